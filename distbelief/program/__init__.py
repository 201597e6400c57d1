"""Plans, placements and clusters, and the programs that each rank executes."""
