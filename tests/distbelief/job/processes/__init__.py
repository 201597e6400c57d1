"""Tests of distbelief.job.processes."""
