"""How long a gradient is that several machines have parts of, and whether it is one.

square      each machine's sum of squares, in float64
norm        the root of their sum, taken in the order of the machines
clipped     g * norm_max / (norm + 1e-6) where that is less than g (torch's rule)
"""

import math
from collections.abc import Mapping
from typing import Final

import torch

from distbelief.runtime.machine.portions import Portion


Gradients = dict[int, torch.Tensor]
"""By item; two of them may share memory."""

_EPSILON: Final = 1e-6  # torch.nn.utils.clip_grad_norm_'s


def sum_of_squares(gradients: Gradients) -> float:
    """Return the sum over all elements, in float64; NaN if they are not finite."""
    total = 0.0
    for gradient in gradients.values():
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        total += float(norm) ** 2
    return total if math.isfinite(total) else math.nan


def clip(gradients: Gradients, square: float, *, norm_max: float | None) -> None:
    """Scale gradients if the norm over all machines is beyond the bound."""
    if norm_max is None:
        return
    factor = norm_max / (math.sqrt(square) + _EPSILON)
    if factor < 1.0:
        for item, gradient in gradients.items():
            gradients[item] = gradient * factor


def is_finite(gradients: Mapping[int, torch.Tensor]) -> bool:
    """Return whether all are, by their sums; see `LocalModel.is_finite`."""
    sums = [gradient.sum() for gradient in gradients.values()]
    return not sums or bool(torch.stack(sums).sum().isfinite())


def bad_sample(portion: Portion) -> int | None:
    """Return the place in the batch of the first sample with NaN or infinity."""
    for regions in portion.inputs.values():
        for part in regions:
            bad = ~part.isfinite()
            if bool(bad.any()):
                return int(bad.nonzero()[0][0])
    return None
