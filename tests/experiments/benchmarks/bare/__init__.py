"""Tests of experiments.benchmarks.bare."""
