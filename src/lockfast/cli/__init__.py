"""The `lockfast` command. `main.py` loads one sub-command, which is a module or a package here."""
