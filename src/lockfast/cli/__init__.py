"""The `lockfast` command: `main.py` finds the sub-command, which is one module or folder here; `terminal.py` prints."""
