"""A quorum on five real servers: lists that make none, nodes that fail, rivals, fences, and what is left behind."""
