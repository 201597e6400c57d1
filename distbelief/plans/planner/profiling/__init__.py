"""Measures layers and this host for the cost model."""
