"""A shard under a coordinator: named vectors, sums of portions, cuts."""
