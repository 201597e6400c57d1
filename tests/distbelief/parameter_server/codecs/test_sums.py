"""The sum of residual and push, and whether it is finite."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from distbelief.parameter_server.codecs import accumulate
from distbelief.parameter_server.codecs.exactness import PIECE
from tests.distbelief.parameter_server.codecs.residuals import LARGEST, residual


SEEDS = st.integers(0, 1 << 60)


@given(seed=SEEDS, other=SEEDS, n_elements=st.integers(0, 300))
def test_a_push_becomes_the_sum(seed: int, other: int, n_elements: int) -> None:
    former, push = residual(seed, n_elements), residual(other, n_elements)
    kept, given_push = former.copy(), push.copy()
    is_finite = accumulate(former, push)
    with np.errstate(over="ignore"):
        total = kept + given_push
    assert former.tobytes() == kept.tobytes()
    assert push.tobytes() == total.tobytes()
    assert is_finite == bool(np.isfinite(total).all())


@pytest.mark.parametrize("place", [0, 63, PIECE - 1, PIECE, PIECE + 65])
@pytest.mark.parametrize(
    ("kept", "pushed"),
    [
        (0.0, np.nan),
        (0.0, np.inf),
        (0.0, -np.inf),
        (np.nan, 1.0),
        (np.inf, -np.inf),
        (LARGEST, LARGEST),
        (-LARGEST, -LARGEST),
    ],
)
def test_a_sum_that_is_not_finite_is_found_anywhere(place: int, kept: float, pushed: float) -> None:
    former, push = np.ones(PIECE + 66, np.float32), np.ones(PIECE + 66, np.float32)
    former[place], push[place] = kept, pushed
    before = former.tobytes()
    assert not accumulate(former, push)
    assert former.tobytes() == before


def test_the_largest_finite_sum_is_finite() -> None:
    former, push = np.full(64, LARGEST, np.float32), np.zeros(64, np.float32)
    push[1::2] = -LARGEST
    assert accumulate(former, push)
    assert push.tolist() == [LARGEST, 0.0] * 32
