"""The job file: its tables, its checks, its entry points."""
