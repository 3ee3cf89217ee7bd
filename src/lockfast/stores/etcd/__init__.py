"""The etcd store: locks on etcd 3.4 or later, over its HTTP interface."""
