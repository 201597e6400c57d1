"""Tests of distbelief.parameter_server.state."""
