"""The keeper: renewal, the states of a lease, being told of its loss, handing it on, and ending.

virtual.py       the core under a clock that the test moves, on a store that fails at will
programs.py      small programs in processes of their own, to be stopped, interrupted and forked
measuring.py     figures that the tests found, shown at the end of the run
test_virtual_*   every state change without a thread, a socket or a wait
test_*           the same and more against real servers and real faults, in both colours
"""
