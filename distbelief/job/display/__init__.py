"""What a job shows while it runs."""
