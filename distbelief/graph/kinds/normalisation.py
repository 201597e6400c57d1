"""Normalisation by statistics: BatchNorm, LayerNorm, GroupNorm, InstanceNorm, RMSNorm.

    kind      "normalise": (x - mean) / sqrt(variance + epsilon) * weight + bias
    inputs    x, mean, variance (statistics broadcast against x; of what is absent,
              "statistics" tells): (x, mean, variance), (x, mean_square), or (x,)
    tensors   weight, bias, running_mean, running_var (trains=False); each may be absent
    options   epsilon; dims: the dimensions of x that the tensors' dimensions are

    kind      "running_average": (1 - momentum) * running + momentum * statistic
    inputs    statistic (batch of one)
    tensors   running (trains=False)
    options   momentum; factor_space: n / (n - 1) is made of the batch times this, for
              a variance; 0 for a mean

With running tensors and inputs, "normalise" uses the inputs in a training step and the
running tensors otherwise; with (x,) alone always the running tensors. New running
statistics leave the graph as layers of kind "running_average", which nobody reads:
`running_averages(graph)` says which tensor each replaces. Composites, last layer named
`name`; `tensors` by torch's words (weight, bias, running_mean, running_var):

    batch_norm_layers(name, source, *, tensors, epsilon, momentum, frozen=False)
    layer_norm_layers(name, source, *, n_dims, tensors, epsilon)
    rms_norm_layers(name, source, *, n_dims, tensors, epsilon)
    group_norm_layers(name, source, *, n_groups, tensors, epsilon)
    instance_norm_layers(name, source, *, tensors, epsilon)
"""
