"""Tests of distbelief.job.directory."""
