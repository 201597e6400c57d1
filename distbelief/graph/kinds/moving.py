"""Elements at other places: permuted, sliced, repeated, padded.

    kind      "permute"
    options   dims: of x without the batch, as in torch.permute

    kind      "slice": x[start : : step] in each dimension, as long as the shape says
    options   starts, steps: a number per dimension, steps >= 1
              (select, narrow, chunk, split: a slice, and a reshape to drop a dimension)

    kind      "expand": extents of 1 repeated
    options   none: the shapes say it all (equal number of dimensions)

    kind      "pad": a number around
    options   before, after: a number >= 0 per dimension; value
"""
