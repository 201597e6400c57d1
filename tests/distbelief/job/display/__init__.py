"""Tests of distbelief.job.display."""
