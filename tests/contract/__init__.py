"""What every store does in both colours: one suite, written once.

driver.py        threads and asyncio behind one face
conftest.py      the stores: a new one is one line there
test_*.py        the promises, through the public names; test_store_port.py checks the stores below them
"""
