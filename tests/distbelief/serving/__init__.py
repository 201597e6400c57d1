"""Tests of distbelief.serving."""
