"""`lockfast run`: run a command under a lock.

    lockfast ──fork──▶ command process: waits for the start message, then execs        (process.py)
        │  └──fork──▶ guardian: ends the command if lockfast dies                      (process.py)
        │
        acquire the lock: one SQLite statement, or with the library and a status line  (lease.py)
        start the command; forward signals, watch the lease and the terminal           (supervisor.py)
        release the lock; exit with the command's code                                 (command.py)

Cron jobs and scripts run this often, so start-up time counts: a short command loads only what it needs, and no module
here imports typing, argparse, logging, threading or pathlib at its top.
"""
