"""A second copy of a shard: kept equal by the leader, and leading if need be."""
