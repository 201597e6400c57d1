"""A parameter server without a job: beside one's own loop, or standing."""
