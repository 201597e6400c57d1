"""Tests of the benchmarks: that they run and tell figures, never how fast."""
