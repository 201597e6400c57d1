"""Data sets as index ranges, a subset per replica, and batches prefetched from them."""
