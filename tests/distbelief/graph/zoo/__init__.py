"""Models for tests: small by their arguments, and true to structure."""
