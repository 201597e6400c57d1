"""A module that is not split: one machine calls it.

    kind      "whole"
    inputs    what its forward takes, in order, each with the batch first
    tensors   its parameters and buffers, by their names in the module
    options   module: its path in the model; key of `Step.modules`
              output: which of several outputs, () if it returns one tensor: (1, 0) is
              the first of the second

The module's own tensors are not read: all come as `tensors`, so it may lie on torch's
meta device. What it does to its buffers is lost. In a training step it is called with
the step's seed, so that whoever computes it again gets the same.
"""
