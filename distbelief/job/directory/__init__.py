"""The run directory: all that a job leaves behind."""
