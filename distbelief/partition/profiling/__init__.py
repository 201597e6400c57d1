"""What this host takes for layers: measured, kept, and used as costs."""
