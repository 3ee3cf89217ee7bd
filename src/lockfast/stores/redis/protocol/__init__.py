"""The wire format: requests, replies, notifications and what error replies mean."""
