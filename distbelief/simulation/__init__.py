"""Runs the real roles on a simulated network, in virtual time, from a seed; forecasts, chaos."""
