"""Memory, files, units and formatting: what every other package may use."""
