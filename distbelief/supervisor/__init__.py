"""The supervisor of a job: starts, watches, restarts and stops its roles. No I/O."""
