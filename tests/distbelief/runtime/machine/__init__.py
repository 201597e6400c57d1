"""Tests of distbelief.runtime.machine.machine."""
