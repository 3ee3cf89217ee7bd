"""Tests of the quorum store, most of them on five real servers."""
