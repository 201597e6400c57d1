"""Tests of distbelief.runtime.task.task."""
