"""Every lock system that lockfast has, on real servers, in both colours; a test's name begins with the system's id.

`docs/systems.md` lists the ids.
"""
