"""Hosts: how they join a job, which roles run on which, and the agent on each of them."""
