"""PURE: decides, and awaits only ports. Imports no clock, no threads, no event loop, no sockets, no randomness.

Read in this order: `lease_state` (states and validity of a lease), `acquire`, `release`, `local_handoff`, `renewal`,
`keepalive`.
"""
