"""Tests of distbelief.parameter_server.client.client."""
