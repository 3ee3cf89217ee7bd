"""The `lockfast` command, driven as its users do: as a process, in a pseudo-terminal and without one."""
