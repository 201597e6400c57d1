"""When a replica fetches, steps by itself and pushes: its consistency with the other replicas."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Async:
    """Downpour SGD: no replica waits for another.

    step                 0        1        2        3        ...    n_fetch = n_push = 2
    fetch                x                 x                        DB-6
    push                 x                 x                        DB-6
    gradients pushed     g0                g1 + g2                  DB-7: raw, summed
    local step                             (x)      x               DB-9
    """

    n_fetch: int = 1  # steps between fetches
    n_push: int = 1  # steps between pushes
    blocking: bool = False  # fetch only once every push is applied
    overwrite_local_steps: bool = False  # a fetch overwrites local steps that are not pushed yet

    def __post_init__(self) -> None:
        for name in ("n_fetch", "n_push"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; use 1 or more")

    @property
    def sums_gradients(self) -> bool:
        """Whether a bad gradient could spoil a sum, or the local copy of the parameters."""
        return self.n_fetch > 1 or self.n_push > 1

    @property
    def keeps_local_steps(self) -> bool:
        # With n_fetch = n_push = 1 there is no local step to keep.
        return self.sums_gradients and not self.overwrite_local_steps

    def fetches_before(self, step: int) -> bool:
        return step % self.n_fetch == 0

    def pushes_after(self, step: int) -> bool:
        return step % self.n_push == 0

    def may_fetch(self, *, unacknowledged: int, during: int | None = None) -> bool:
        """Return whether a fetch may begin.

        Args:
            unacknowledged: Own pushes that are not applied on every shard.
            during: The step that is being computed, if any.
        """
        # With a push in flight it is unknown whether the fetched parameters contain it, and so
        # whether its local steps must be repeated (DB-11).
        if unacknowledged and (self.blocking or self.keeps_local_steps):
            return False
        if during is None:
            return True
        return not (self.blocking or (self.keeps_local_steps and self.pushes_after(during)))
