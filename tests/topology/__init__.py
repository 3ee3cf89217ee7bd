"""Replicas, sentinels and clusters: what they do for locks, and what is left when servers fail under load."""
