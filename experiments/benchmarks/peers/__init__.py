"""The same course of training with several systems, one module each."""
