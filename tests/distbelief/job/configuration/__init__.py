"""Tests of distbelief.job.configuration."""
