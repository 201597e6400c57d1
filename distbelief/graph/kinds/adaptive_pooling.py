"""Pooling to a given size: output o of n reads [floor(o H / n), ceil((o + 1) H / n)).

    kinds     "adaptive_average_pool", "adaptive_max_pool"
    inputs    (channels, *space), one to three dimensions of space
    options   none: the layer's shape says it all

`adaptive_pool_layers(name, source, *, sizes, maximum)` returns the best layer for it:
the mean over all places (a sum of parts), plain pooling where windows are equal, or one
of these two kinds.
"""
