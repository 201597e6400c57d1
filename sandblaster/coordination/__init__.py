"""The coordinator: it drives a method, and deals portions. It sees no parameter."""
