"""`lockfast run`; `command.py` explains how it works."""
