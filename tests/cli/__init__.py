"""The `lockfast` command, run as a process, with and without a terminal."""
