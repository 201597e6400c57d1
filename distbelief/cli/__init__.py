"""The command line `distbelief`."""
