"""The role of one machine of a group: its leader, its steps, its mail."""
