"""Tests of distbelief.job.resuming.resuming."""
