"""Tests of distbelief.parameter_server.serving."""
