"""Tests of distbelief.cli.main."""
