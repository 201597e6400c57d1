"""Tests of distbelief.runtime."""
