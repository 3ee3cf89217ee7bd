"""More than one server: Sentinel, Cluster, replicas and the nodes of a quorum."""
