"""The Lua scripts, and the requests that run them."""
