"""What benchmarks have in common: turns, crews that take them, figures."""
