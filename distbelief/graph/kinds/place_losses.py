"""Losses that are a sum over places: one-vs-all logistic, squares, absolute values.

    kind      "place_loss": sum or mean over all places of f(x, target)
    inputs    x; target of the same shape, or (labels) whole numbers without dim `dim`
    options   function: "logistic" "mse" "l1" "smooth_l1" "huber" "soft_margin"
              "binary_cross_entropy" "poisson_nll" "kl_div"
              argument: beta of smooth_l1, delta of huber; else 0.0
              mean: over the places of a sample, or the sum
              labels: whether target is labels; place c has target 1 if it is the label
              dim: the dimension of x that labels choose from; -1 if labels is False

The output is () for each sample: the loss of the batch is the mean of it over samples,
which is the business of who runs the graph. Split over any dimension, as partial sums.
"""
