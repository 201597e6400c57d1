"""Tests of distbelief.downpour."""
