"""Starts, watches, restarts and stops the roles of a job. Pure: no process, no file."""
