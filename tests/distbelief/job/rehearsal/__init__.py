"""Tests of distbelief.job.rehearsal.rehearsal."""
