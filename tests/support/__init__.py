"""Servers, a faulty network and other tools for the tests.

servers.py       real Redis and Valkey servers to start, pause and kill; guardian.py kills them if the tests crash
topologies.py    groups of them: replicas with sentinels, a cluster, a quorum
other_servers.py etcd and ZooKeeper
signals.py       default signal dispositions for every process that the tests start
wire.py          a minimal client for admin commands and exact bytes
proxy.py         a network that loses, delays and holds frames: faults.py has the rules, link.py one connection,
                 conversation.py assigns replies to requests
resp.py          frames of the wire protocol
terminal.py      a program on a pseudo-terminal
lateness.py      how late this machine wakes threads, for bounds in milliseconds
waiting.py       bounded polling for states that nothing announces
"""
