"""What the tests stand on.

servers.py       real servers, started, paused and killed at will (guardian.py ends them with the tests)
wire.py          a client of our own for admin commands and exact bytes
proxy.py         a network that can be told what to lose: faults.py holds the rules, link.py one connection,
                 conversation.py tells which reply answers which request
resp.py          frames of the wire protocol
waiting.py       bounded polling, for what can only be observed from outside
"""
