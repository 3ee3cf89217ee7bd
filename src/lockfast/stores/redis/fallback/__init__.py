"""The transaction mode, for accounts that may not run scripts."""
