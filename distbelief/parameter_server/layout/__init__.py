"""Which shard holds which elements of which tensors, and parts of them."""
