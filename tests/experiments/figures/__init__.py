"""Tests of `experiments.figures`."""
