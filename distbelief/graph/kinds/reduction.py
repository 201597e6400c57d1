"""Sums, means and maxima over dimensions: what is partial, combined, then used.

    kind      "reduction"
    inputs    x, and for some functions a statistic that broadcasts against x
    options   function: one of `FUNCTIONS`
                "sum"  "mean"  "mean_square"         of x
                "variance"   mean of (x - mean)^2    inputs x, mean
                "sum_exp"    sum of exp(x - maximum) inputs x, maximum
              dims: which dimensions of x, without the batch, from 0
              keep: whether they stay, with extent 1
              batch: whether the samples of the batch are summed over as well
              correction: taken from the count in "variance" (1: unbiased); 0 or absent

    kind      "maximum"
    inputs    x
    options   dims, keep; gradient: whether it has one (softmax needs none)

A reduction over the batch gives one sample, (1, *shape), that broadcasts: the batch is
never split over machines, so nothing else is needed for it. A maximum with a gradient
is not split over what it is taken over: of equal values it would be unclear which.
"""
