"""Hosts: how they join, which roles run on which, and the agent on each of them."""
