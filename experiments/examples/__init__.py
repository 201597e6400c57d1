"""Examples of a user's own code, each tried by a test."""
