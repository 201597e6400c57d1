"""The client of the parameter server: fetches from all shards and pushes to them."""
