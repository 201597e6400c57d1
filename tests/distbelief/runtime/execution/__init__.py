"""Tests of distbelief.runtime.execution.execution."""
