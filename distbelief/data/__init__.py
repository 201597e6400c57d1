"""Data sets, and which samples each replica trains in which order."""
