"""The tests: they mirror the packages, one module per module."""
