"""The same work without what costs something: what could be reached at most."""
