"""How lockfast compares: one module per claim, measured side by side with other lock libraries.

`python -m bench` runs them all; `harness.py` says how figures are made, `peers.py` whom we are compared with.
"""
