"""Tests of distbelief.cli.app."""
