"""Arguments of functions that a job names."""

import pytest

from distbelief.task.imports import own_arguments


def _maker(n: int = 1, scale: float = 1.0, parts: tuple[int, ...] = (1, 2)) -> None:
    """Takes what a job names."""


@pytest.mark.parametrize(
    ("arguments", "own"),
    [
        ({"n": 1, "scale": 1.0, "parts": [1, 2]}, {}),
        ({"n": True, "scale": 1}, {"n": True, "scale": 1}),
        ({"parts": [True, 2], "other": 1}, {"parts": [True, 2], "other": 1}),
    ],
)
def test_an_argument_of_another_type_is_no_default(
    arguments: dict[str, object], own: dict[str, object]
) -> None:
    """1, 1.0 and True are equal, and make different tensors."""
    found = own_arguments(f"{__name__}:_maker", arguments)
    assert {key: repr(value) for key, value in found.items()} == {
        key: repr(value) for key, value in own.items()
    }
