"""What benchmarks have in common: processes that take turns, what they use, tables, figures."""
