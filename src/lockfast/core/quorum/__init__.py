"""A quorum: several independent servers that together are one store. `rules.py` decides, `store.py` does.

`nodes.py` knows which servers can be asked now, and looks after those that cannot; `round.py` asks all at once and
counts; `mailbox.py` waits for the votes that come later.
"""
