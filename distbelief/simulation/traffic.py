"""Traffic: how many messages, and bytes, went from whom to whom.

Bytes are those of the large task, where a small one stands for it (`scales`). What
passes through shared memory is not sent.
"""

from collections.abc import Mapping, Sequence
from typing import final

from distbelief.roles import Address


@final
class Traffic:
    """What was sent so far.

    Args:
        tallies: Messages and bytes, by sender and receiver.
    """

    def __init__(self, tallies: Mapping[tuple[Address, Address], Sequence[float]]) -> None:
        self._tallies = {ends: (int(n), b) for ends, (n, b) in tallies.items()}

    @property
    def messages(self) -> int:
        """How many there were."""
        return sum(n for n, _ in self._tallies.values())

    @property
    def n_bytes(self) -> float:
        """How large they were together."""
        return sum(n_bytes for _, n_bytes in self._tallies.values())

    @property
    def sent(self) -> Mapping[Address, float]:
        """Bytes that each role sent."""
        return self._by_end(0)

    @property
    def received(self) -> Mapping[Address, float]:
        """Bytes that were sent to each role."""
        return self._by_end(1)

    def between(self, sender: str, receiver: str) -> float:
        """Return the bytes from roles whose names begin so to such others."""
        return sum(
            n_bytes
            for ends, (_, n_bytes) in self._tallies.items()
            if ends[0].startswith(sender) and ends[1].startswith(receiver)
        )

    def _by_end(self, end: int) -> Mapping[Address, float]:
        totals: dict[Address, float] = {}
        for ends, (_, n_bytes) in self._tallies.items():
            totals[ends[end]] = totals.get(ends[end], 0.0) + n_bytes
        return totals
