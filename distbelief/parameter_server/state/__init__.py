"""What a shard holds: values, its rule's state, slots of clients, snapshots."""
