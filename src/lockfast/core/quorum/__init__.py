"""A store made of several independent servers: a lock is held by the holder of a majority of them."""
