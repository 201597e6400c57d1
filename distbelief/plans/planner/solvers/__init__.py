"""Solvers of the placement problem; they see numbers only."""
