"""The objects that users hold: connections, locks, leases, and the tools built on them."""
