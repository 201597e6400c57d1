"""Which model learns what, from which data: found, tried, checked."""
