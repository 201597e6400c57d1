"""Table [algorithm] of a Downpour job, the settings of one replica, and its consistency policy."""

import math
from dataclasses import dataclass, field
from typing import final

import msgspec

from distbelief.parameter_server.optimizers import Constant, Schedule, UpdateRule
from distbelief.roles.role import Seconds


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DownpourConfig:
    """How one replica trains."""

    batch_size: int  # samples of one step
    policy: Async = field(default_factory=Async)  # when it fetches and pushes
    learning_rate: float = 0.0  # of the shards' rule, for messages and local steps
    local_learning_rate: float | None = None  # of local steps; None: `learning_rate`
    # Of the shards' rule; local steps follow it.
    schedule: Schedule = field(default_factory=Constant)
    clip_norm: float | None = None  # bound of each gradient's 2-norm; None: no bound
    max_steps: int | None = None  # steps of one incarnation; None: until a Stop
    max_samples: int | None = None  # samples of all incarnations together; None: until a Stop
    progress_seconds: Seconds = 0.5  # least time between reports to the supervisor
    non_finite_limit: int = 10  # gradients in a row that may be NaN or infinite

    def __post_init__(self) -> None:
        for name in ("batch_size", "non_finite_limit", "max_steps", "max_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; use 1 or more")
        if self.clip_norm is not None and not 0.0 < self.clip_norm < math.inf:
            raise ValueError(
                f"clip_norm is {self.clip_norm}; use a number above 0, or leave it out"
            )
        if self.progress_seconds < 0.0:
            raise ValueError(f"progress_seconds is {self.progress_seconds}; use 0 or more")

    def rate(self, clock: int) -> float:
        """Return the rate of local steps from parameters of this clock."""
        local = self.local_learning_rate
        rate = self.learning_rate if local is None else local
        return rate * self.schedule.factor(clock)


class DownpourSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [algorithm] of a job with name = "downpour".

    Attributes:
        loss: torch's name of it, or an import path (see `task.losses`).
        batch_size: Samples of one step of one replica.
        rule: How the shards apply a push, for example
            { name = "adagrad", learning_rate = 0.02 }.
        n_fetch: Steps between fetches (in all experiments of the paper: 1).
        n_push: Steps between pushes (in all experiments of the paper: 1).
        blocking: Fetch only once every push is applied: with one replica, plain SGD.
            If n_fetch or n_push is above 1, fetches wait for pushes anyway.
        overwrite_local_steps: A fetch overwrites the local steps whose gradients are
            not pushed yet, as in the paper. By default they are repeated from the
            fetched parameters.
        warm_start_steps: Steps of replica 0 alone, before the others start.
        local_learning_rate: Of a replica's own steps between fetches and pushes,
            before the rule's schedule. By default the rule's. With an adaptive rule it
            is required if n_fetch > 1; if only n_push > 1, a replica without it takes
            no steps of its own and only sums gradients.
        clip_norm: Upper bound of each mini-batch gradient's 2-norm; None: no bound.
        max_steps: Steps after which each replica ends by itself; None: until a Stop.
        non_finite_limit: Gradients in a row with NaN or Inf, each skipped and logged,
            before a replica gives up.
        seed: Of the order of samples and of the model's random numbers (dropout).
    """

    loss: str
    batch_size: int
    rule: UpdateRule
    n_fetch: int = 1
    n_push: int = 1
    blocking: bool = False
    overwrite_local_steps: bool = False
    warm_start_steps: int = 0
    local_learning_rate: float | None = None
    clip_norm: float | None = None
    max_steps: int | None = None
    non_finite_limit: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        # msgspec turns a ValueError into an error that names the table.
        if self.warm_start_steps < 0:
            raise ValueError(f"warm_start_steps is {self.warm_start_steps}; use 0 or more")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; use 0 or more")
        if self.local_learning_rate is not None and not (0.0 < self.local_learning_rate < math.inf):
            raise ValueError(
                f"local_learning_rate is {self.local_learning_rate}; use a number "
                "above 0, or leave it out"
            )
        if self.rule.adaptive and self.n_fetch > 1 and self.local_learning_rate is None:
            raise ValueError(
                f"n_fetch is {self.n_fetch} and rule {self.rule.name!r} adapts its "
                "rate on the shards; between fetches a replica takes plain SGD steps, "
                "at a rate that only you can choose: give local_learning_rate, or use "
                "n_fetch = 1"
            )
        self.of_replica()  # checks the rest

    def of_replica(self) -> DownpourConfig:
        """Return the settings of one replica."""
        local = self.local_learning_rate
        # An adaptive rule has no rate that would fit a local step.
        if local is None and self.rule.adaptive:
            local = 0.0
        return DownpourConfig(
            batch_size=self.batch_size,
            policy=Async(
                n_fetch=self.n_fetch,
                n_push=self.n_push,
                blocking=self.blocking,
                overwrite_local_steps=self.overwrite_local_steps,
            ),
            learning_rate=self.rule.learning_rate,
            local_learning_rate=local,
            schedule=self.rule.schedule,
            clip_norm=self.clip_norm,
            max_steps=self.max_steps,
            non_finite_limit=self.non_finite_limit,
        )
