"""Pooling over sliding windows: the maximum, the average, or a power mean (L2).

    kinds     "max_pool", "average_pool", "l2_pool"
    inputs    (channels, *space), one to three dimensions of space
    options   size, stride, padding: a number per dimension of space
              max_pool: dilation likewise; ceil: whether a last window may end outside
              average_pool: ceil; count_include_pad; divisor: a number, or None
              l2_pool: epsilon; gaussian: whether windows are weighted (2d only)

`L2Pool2d(kernel_size, *, stride=None, padding=0, epsilon=0.0, gaussian=False)` is the
root of the sum of squares over a window, plus epsilon. Stride is never None here: who
captures a module whose stride is None writes its size.
"""
