"""Tests of experiments.benchmarks.network."""
