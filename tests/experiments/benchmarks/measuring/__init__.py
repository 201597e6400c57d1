"""Tests of experiments.benchmarks.measuring."""
