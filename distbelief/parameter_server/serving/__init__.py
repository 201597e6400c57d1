"""What a shard does for its clients: fetches and pushes."""
