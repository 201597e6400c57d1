"""One machine's program of a step: operations on slots, and their order."""
