"""Tests of experiments.benchmarks.simulated."""
