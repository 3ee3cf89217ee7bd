"""PURE: decides, and awaits only ports. Imports no clock, no threads, no event loop, no sockets, no chance.

Read in this order: `validity` (how long a grant is good for), `deadline`, `acquire`, `adopt`, `release`, `holding` (the
states of a lease), `keep` (renewal).
"""
