"""The parameter server: layout, shard role, update rules, client, snapshots."""
