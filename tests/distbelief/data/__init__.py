"""Tests of distbelief.data."""
