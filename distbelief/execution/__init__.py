"""Runs one rank's program: micro-batches forward and backward, as activations arrive."""
