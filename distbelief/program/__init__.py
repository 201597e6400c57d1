"""Plans, placements and clusters; the tasks and messages of a step, and what it costs."""
