"""Every decoder, on bytes that no friend would send: `python -m experiments.fuzz`."""
