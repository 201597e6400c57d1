"""Nets, plans of them and what else makes plans; how fast this machine is now."""
