"""Who computes what: plans, compiled to one program per machine, and their price."""
