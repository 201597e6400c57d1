"""Tests of the synthetic speech task."""
