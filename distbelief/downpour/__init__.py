"""Downpour SGD: the replica that fetches and pushes, the warm start, its job."""
