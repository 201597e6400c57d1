"""What the end of an algorithm that ends by itself means. Its import loads no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """On a coordinator that has ended.

    Attributes:
        reason: Why it has, for the user.
        failed: Whether the job has failed with it.
    """

    reason: str
    failed: bool = False


Judge = Callable[[Mapping[str, float]], Verdict]
"""From the last counters of a coordinator."""


def done(counters: Mapping[str, float]) -> Verdict:
    """Return what is said if nobody knows more."""
    del counters
    return Verdict(reason="the coordinator is done")
