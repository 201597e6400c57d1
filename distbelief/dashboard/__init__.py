"""The page of runs: a small server that reads their directories, and what it serves."""
