"""Training algorithms, found through entry points: Downpour SGD."""
