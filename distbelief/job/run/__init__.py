"""Run directory, checkpoints, model, metrics, summary, and resuming a run."""
