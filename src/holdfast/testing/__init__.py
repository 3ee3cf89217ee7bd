"""For those who test: `contract` checks a store of your own; the other modules run the shipped code in a small world.

Nothing outside this package imports it.
"""
