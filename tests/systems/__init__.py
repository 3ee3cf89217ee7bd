"""The lock systems of `docs/systems.md`, on real servers, in both flavours.

A test carries the id of its row as a marker, `@pytest.mark.system("C5")`; `pytest --system C5` runs the tests of a row.
"""
