"""The work that any process may do for all: promote, reap, prune."""
