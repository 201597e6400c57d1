"""The coordinator of Sandblaster: deals chunks and commands shards, and never sees a parameter."""
