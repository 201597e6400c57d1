"""The client of all shards: embedded in roles that fetch and push."""
