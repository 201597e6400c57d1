"""Processes of one host: the fork server, the main function of a role, the preflight checks."""
