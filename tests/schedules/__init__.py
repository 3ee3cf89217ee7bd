"""Systematic schedules of both flavours: a cancellation at every await, and a thread switch at every line."""
