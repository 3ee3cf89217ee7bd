"""The two shells under systematic schedules: asyncio with a cancellation at every await, threads with every switch."""
