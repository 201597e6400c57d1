"""Runs one rank's dataflow: micro-batches forward and backward, as activations arrive."""
