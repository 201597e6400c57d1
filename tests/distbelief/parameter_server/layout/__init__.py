"""Tests of distbelief.parameter_server.layout.layout."""
