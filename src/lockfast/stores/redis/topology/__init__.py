"""More than one server: a master with replicas, or a cluster."""
