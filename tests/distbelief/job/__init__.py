"""Tests of a job: its file, supervisor, members, run directory and progress."""
