"""Predicts speed and progress of a job on a cluster, by simulating it."""
