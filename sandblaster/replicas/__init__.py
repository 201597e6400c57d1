"""The replicas: they compute the sets that they are dealt, and push their sums."""
