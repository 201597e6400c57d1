"""Locally connected layers: convolutions whose weights are not shared between places.

    kind      "locally_connected"
    inputs    (channels in, rows, columns)
    tensors   weight (rows out, columns out, channels out, channels in * window rows *
              window columns); bias (rows out, columns out, channels out)
    options   size, stride, padding: a number for rows, one for columns

The module is `LocallyConnected2d(in_channels, out_channels, kernel_size, *, input_size,
stride=1, padding=0, bias=True)`. Weights come position-first, so that what a part of
the image uses is contiguous. Cut in space, a part needs a halo of its input and the
weights of its own places, which nobody else has: nothing is summed but halo gradients.
Source: Le et al. 2012, "Building high-level features using large scale unsupervised
learning", section 3; the paper's vision model has 10 x 10 windows.
"""
