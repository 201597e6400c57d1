"""Tests of distbelief.parameter_server.rules."""
