"""Softmax and its logarithm, over a dimension that may be split.

    kind      "softmax": exp(x - maximum) / sum, or its logarithm
    inputs    x, maximum, sum of exp(x - maximum); these two broadcast against x
    options   log: whether the logarithm is wanted

    softmax_layers(name, source, *, dim, log=False)    maximum, sum_exp, softmax
"""
