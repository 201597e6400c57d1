"""Optimisers: generators of operations on named vectors. A method is one short file."""
