"""Pushes that leave marks, for `chaos.py`."""
