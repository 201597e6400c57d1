"""Several hosts in one, and who is on their network."""
