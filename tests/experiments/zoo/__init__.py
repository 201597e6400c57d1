"""Tests of `experiments.zoo`."""
