"""Complete programs of at most 40 lines."""
