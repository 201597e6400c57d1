"""Scaled dot-product attention, split by heads and by queries.

    kind      "attention"
    inputs    query (*heads, queries, size), key (*heads, keys, size),
              value (*heads, keys, size of values); a fourth, optional: a mask that is
              added to the scores, and broadcasts against (*heads, queries, keys)
    options   causal: whether query i sees keys 0 to i only
              scale: factor of the scores, or None for 1 / sqrt(size)

Cut by heads or queries, not by size. A causal part needs no keys after its last query.

    multi_head_attention_layers(name, sources, *, n_heads, tensors, causal, mask="")

`sources` are query, key, value, each (positions, features); `tensors` as in
torch.nn.MultiheadAttention: in_proj_weight or q_proj_weight, k_proj_weight,
v_proj_weight; in_proj_bias; out_proj.weight, out_proj.bias.
"""
