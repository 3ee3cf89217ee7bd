"""A program for type checkers."""
