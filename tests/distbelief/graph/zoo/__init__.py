"""Models for tests: small, with the structure of the originals."""
