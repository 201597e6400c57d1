"""Plans: which rank computes what; the tasks and messages of a step, and what it costs."""
