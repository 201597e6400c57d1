"""Tests of distbelief.parameter_server.orders.orders."""
