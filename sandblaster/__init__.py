"""Sandblaster: batch optimisation on the same shards. It arrives later."""
