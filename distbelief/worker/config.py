"""Table [algorithm] of a Downpour job, and the consistency policy of its replicas."""

import math
from dataclasses import dataclass
from typing import final

import msgspec

from distbelief.parameter_server.optimizers import UpdateRule


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
        """Return whether a fetch may begin, during the computation of a step or between two."""
        # With a push in flight it is unknown whether the fetched parameters contain it, and so
        # whether its local steps must be repeated (DB-11).
        if unacknowledged and (self.blocking or self.keeps_local_steps):
            return False
        if during is None:
            return True
        return not (self.blocking or (self.keeps_local_steps and self.pushes_after(during)))


class DownpourSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [algorithm] of a job with name = "downpour"."""

    loss: str  # torch's name of it, or an import path (see `task.losses`)
    batch_size: int  # samples of one step of one replica
    rule: UpdateRule  # how the shards apply a push: { name = "adagrad", learning_rate = 0.02 }
    n_fetch: int = 1  # steps between fetches (in all experiments of the paper: 1)
    n_push: int = 1  # steps between pushes (in all experiments of the paper: 1)
    # Fetch only once every push is applied: with one replica, plain SGD. If n_fetch or n_push is
    # above 1, fetches wait for pushes anyway.
    blocking: bool = False
    # A fetch overwrites the local steps whose gradients are not pushed yet, as in the paper. By
    # default they are repeated from the fetched parameters.
    overwrite_local_steps: bool = False
    warm_start_steps: int = 0  # steps of replica 0 alone, before the others start
    # Of a replica's own steps between fetches and pushes, before the rule's schedule; by default
    # the rule's. With an adaptive rule it is required if n_fetch > 1; if only n_push > 1, a replica
    # without it takes no steps of its own and only sums gradients.
    local_learning_rate: float | None = None
    clip_norm: float | None = None  # bound of each mini-batch gradient's 2-norm; None: no bound
    max_steps: int | None = None  # of each incarnation of a replica; None: until a Stop
    # Gradients in a row with NaN or Inf, each skipped and logged, before a replica gives up.
    non_finite_limit: int = 10
    seed: int = 0  # of the order of samples and of the model's random numbers (dropout)

    def __post_init__(self) -> None:
        # msgspec turns a ValueError into an error that names the table.
        _ = self.policy  # checks n_fetch and n_push
        for name in ("batch_size", "non_finite_limit", "max_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; use 1 or more")
        for name in ("warm_start_steps", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; use 0 or more")
        for name in ("clip_norm", "local_learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ValueError(f"{name} is {value}; use a number above 0, or leave it out")
        if self.rule.adaptive and self.n_fetch > 1 and self.local_learning_rate is None:
            raise ValueError(
                f"n_fetch is {self.n_fetch} and rule {self.rule.name!r} adapts its "
                "rate on the shards; between fetches a replica takes plain SGD steps, "
                "at a rate that only you can choose: give local_learning_rate, or use "
                "n_fetch = 1"
            )

    @property
    def policy(self) -> Async:
        return Async(
            n_fetch=self.n_fetch,
            n_push=self.n_push,
            blocking=self.blocking,
            overwrite_local_steps=self.overwrite_local_steps,
        )

    def rate(self, clock: int) -> float:
        """Return the rate of local steps from parameters of this clock."""
        rate = self.local_learning_rate
        if rate is None:  # no rate of an adaptive rule would fit a local step
            rate = 0.0 if self.rule.adaptive else self.rule.learning_rate
        return rate * self.rule.schedule.factor(clock)
