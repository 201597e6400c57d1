"""A model replica: trains, evaluates, whole or as ranks of a model-parallel group."""
