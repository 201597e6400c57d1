"""A tensor of the model as a layer: position embeddings, class tokens, scales.

    kind      "parameter"
    inputs    none
    tensors   value: of the layer's shape
    options   none

Its output does not depend on the sample, so its batch has one sample, (1, *shape),
which broadcasts against the batches of others.
"""
