"""Connections: one for requests and one inbox for notifications, for threads and for asyncio."""
