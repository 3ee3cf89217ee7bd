"""Known problems of other lock libraries, one test each, on real servers and in both flavours.

flavours.py      one blocking interface to threads and asyncio
observation.py   observes the server, and selects requests for the proxy
programs.py      small programs in their own processes, to be stopped and killed
hunter.py        a program that contends at random and records its leases
"""
