"""The figures of Dean et al. 2012, from simulations, beside its published points."""
