"""What users hold: connections, locks, leases and what is built on them."""
