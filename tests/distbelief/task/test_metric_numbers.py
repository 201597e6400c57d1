"""What a metric may return: one real number, of any type."""

from typing import cast

import numpy as np
import pytest
import torch

from distbelief.core.errors import JobError
from distbelief.task.losses import MeanMetric, Measures


def measures_of(value: object) -> Measures:
    """Measures with a metric of the user's, of any type, that returns this."""
    own = cast("MeanMetric", lambda _outputs, _targets: value)
    return Measures(lambda _outputs, _targets: torch.tensor(2.0), {"own": own})


@pytest.mark.parametrize(
    "value",
    [
        *(0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), np.array([0.5], np.float16)),
        *(torch.tensor(0.5), torch.tensor([[0.5]], dtype=torch.bfloat16)),
    ],
)
def test_a_real_number_of_any_type_is_a_metric(value: object) -> None:
    measures = measures_of(value)
    assert measures.of(None, None) == [2.0, 0.5]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        *((1j, "complex"), (True, "bool"), (np.True_, "bool of shape"), (None, "NoneType")),
        *((torch.tensor(1j), "complex64 of"), (torch.ones(1, dtype=torch.bool), "bool of shape")),
        *((10**400, "a number that is too large"), ("0.5", "str"), (np.zeros(2), "float64 of")),
    ],
)
def test_anything_else_is_refused_with_the_name_of_the_metric(value: object, found: str) -> None:
    measures = measures_of(value)
    with pytest.raises(JobError, match=f"metric own returned {found}.*: it must return one number"):
        measures.of(None, None)
