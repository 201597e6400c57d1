"""Experiments: each keeps its question, command, seed and result."""
