"""The keepalive: renewal, the states of a lease, the report of a loss, and the end of a program.

virtual.py        the core with a virtual clock and a store that fails on demand
programs.py       small programs in other processes, to be stopped, interrupted and forked
callbacks.py      a recorder of the callbacks of leases
loss.py           ways to lose a lease
measurements.py   measured values, shown at the end of the run
test_virtual_*    every state change without a thread, a socket or a wait
test_*            real servers and real faults, in both flavours
"""
