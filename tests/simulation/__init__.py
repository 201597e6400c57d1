"""Whole systems in virtual time: many roles, one seed, faults included."""
