"""Benchmarks of lockfast and other lock libraries, one module per claim.

`python -m bench` runs them all. `harness.py` defines how figures are computed, `peers.py` lists the other libraries.
"""
