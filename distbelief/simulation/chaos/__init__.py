"""Injects faults into a job, simulated or real, and reports how it coped."""
