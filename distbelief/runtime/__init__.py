"""The role that computes a model replica's steps, and the evaluator."""
