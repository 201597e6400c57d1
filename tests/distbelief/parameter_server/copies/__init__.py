"""Tests of distbelief.parameter_server.copies.copies."""
