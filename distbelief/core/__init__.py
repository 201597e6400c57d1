"""Memory regions, files, units, signals and formatting, used by all other packages."""
