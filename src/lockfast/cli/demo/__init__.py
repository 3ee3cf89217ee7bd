"""`lockfast demo`: four processes increment one counter without a lock, with it, and while one of them is killed.

- `command.py`: options, the three acts, how one is played
- `scene.py`: the state of an act, its live view and its findings
- `crew.py`: the worker processes, seen from the parent; `worker.py`: one of them, its messages and the counter file
"""
