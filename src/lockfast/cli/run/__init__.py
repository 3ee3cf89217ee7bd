"""`lockfast run`: a command under a lock.

    lockfast ──fork──▶ the command's process, waiting for the word to begin (`launch.py`)
        │  └──fork──▶ the guardian, waiting for lockfast's death
        │
        takes the lock: at once (`hold.py`), or with the library and a word to who waits (`waiting.py`)
        gives the word; passes signals on, looks after the lease and the terminal (`watch.py`)
        gives the lock back, and ends as the command did

Start-up time counts here, because cron jobs and scripts start it often: nothing is loaded that a short command does
not need, and no module below imports typing, argparse, logging or pathlib.
"""
