"""A job: its file, supervisor, members, launcher, run directory and progress."""
