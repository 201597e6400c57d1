"""A plan run for real on this host, without parameter servers."""
