"""Tests of distbelief.job.supervision."""
