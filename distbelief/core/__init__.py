"""Errors, memory regions, files, units, signals and formatting, used by all other packages."""
