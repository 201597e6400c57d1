"""The run directory: checkpoints, model, metrics, summary, and resuming from them."""
