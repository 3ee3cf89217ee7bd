"""`lockfast demo`: what a lock is for, seen with one's own eyes.

- `command.py`: the options, the temporary folder, and how it all ends
- `acts.py`: the three acts and how they are played; `scene.py` is what is known of the act that is on
- `screen.py`: what is shown while an act is on; `verdict.py`: what is said after it
- `crew.py`: the worker processes as the parent sees them; `worker.py`: one of them; `messages.py`: what they say
- `counter.py`: the file that they all write
"""
