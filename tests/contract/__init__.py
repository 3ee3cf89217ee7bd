"""One suite for every store in both flavours.

driver.py        one interface to threads and asyncio, so that a scenario is written once
stores.py        the stores; a new one is one line
test_*.py        scenarios through the public names; test_store_port.py checks the port below them
"""
