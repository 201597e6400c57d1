"""Tests of experiments.benchmarks.plans."""
