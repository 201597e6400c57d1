"""The documentation is true: its code runs, its tables miss nothing, links exist."""
