"""Locks on replicas, sentinels and clusters, and server failures under load."""
