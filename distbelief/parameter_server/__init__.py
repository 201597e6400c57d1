"""The sharded parameter server: shards, their copies, checkpoints and named vectors."""
