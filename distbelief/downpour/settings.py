"""Table [algorithm] of a job by Downpour SGD, and what may be wrong with it."""

import math

import msgspec

from distbelief.downpour.config import DownpourConfig
from distbelief.parameter_server.rules.update_rules import UpdateRule


class DownpourSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [algorithm] of a job with name = "downpour".

    Attributes:
        loss: torch's name of it, or an import path (see `runtime.losses`).
        batch_size: Samples of one step of one replica.
        rule: How the shards apply a push, for example
            { name = "adagrad", learning_rate = 0.02 }.
        n_fetch: Steps between fetches (in all experiments of the paper: 1).
        n_push: Steps between pushes (in all experiments of the paper: 1).
        blocking: Fetch only once every push is applied: with one replica, plain SGD.
            If n_fetch or n_push is above 1, fetches wait for pushes anyhow.
        overwrite_local_steps: A fetch overwrites the local steps whose gradients are
            not pushed yet, as the paper has it. By default they are taken again from
            the parameters fetched.
        warm_start_steps: Steps of replica 0 alone, before the supervisor releases the
            others.
        local_learning_rate: Of a replica's own steps between fetches and pushes,
            before the rule's schedule. By default the rule's. With an adaptive rule it
            must be given if n_fetch > 1; if only n_push > 1, a replica without it takes
            no steps of its own and only sums gradients.
        clip_norm: Upper bound of each mini-batch gradient's 2-norm; None: no bound.
        max_steps: Steps after which each replica ends by itself; None: told to.
        non_finite_limit: Gradients in a row with NaN or Inf, each skipped and named,
            before a replica gives up.
        seed: Of the order of samples and of the model's own randomness (dropout).
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
        """Refuse what cannot be run, by name and value.

        Raises:
            ValueError: which msgspec turns into an error that names the table.
        """
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
                "whose rate only you can choose: give local_learning_rate, or use "
                "n_fetch = 1"
            )
        self.of_replica()  # checks the rest

    def of_replica(self) -> DownpourConfig:
        """Return what a replica needs to know of it."""
        local = self.local_learning_rate
        if local is None and self.rule.adaptive:
            local = 0.0
        return DownpourConfig(
            batch_size=self.batch_size,
            n_fetch=self.n_fetch,
            n_push=self.n_push,
            blocking=self.blocking,
            overwrite_local_steps=self.overwrite_local_steps,
            learning_rate=self.rule.learning_rate,
            local_learning_rate=local,
            schedule=self.rule.schedule,
            clip_norm=self.clip_norm,
            max_steps=self.max_steps,
            non_finite_limit=self.non_finite_limit,
            seed=self.seed,
        )
