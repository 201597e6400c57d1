"""Table [algorithm] of a Downpour job: how replicas train, and exchange what they learn."""

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Literal

import msgspec

from distbelief.core import torch_optimizers
from distbelief.core.arguments import key_of
from distbelief.core.pieces import PieceOrder, Pieces
from distbelief.core.spans import Epochs
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy
from distbelief.parameter_server.rules import UpdateRule
from distbelief.task.data import DataShard
from distbelief.worker.batches import TrainingPlan, micro_sizes
from distbelief.worker.exchange import EVERY_MIN, Pace


class LockFree(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Threads of a replica that take steps on the same parameters without locks."""

    threads: int
    # Of each small batch, after which a thread updates the parameters; None: a step has as many
    # small batches as threads.
    samples: int | None = None

    def __post_init__(self) -> None:
        for name in ("threads", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; use 1 or more")

    def sizes(self, n_samples: int, *, batch_size: int) -> list[int]:
        """Return the samples of each small batch of a step, which may have less than a whole one.

        Then small batches are as large as those of a whole one, and fewer.
        """
        if self.samples is None and n_samples == batch_size:
            return micro_sizes(n_samples, self.threads)
        samples = self.samples or max(batch_size // self.threads, 1)
        n, rest = divmod(n_samples, samples)
        sizes = [samples] * n + [rest] * (rest > 0)
        # One sample has no variance, which a model may need: it joins the others, as of a pass.
        if rest == 1 and n:
            sizes[-2:] = [samples + 1]
        return sizes


class DownpourSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    loss: str  # torch's name of it, or an import path (see `task.losses`)
    batch_size: int  # samples of one step of one replica
    rule: UpdateRule  # how the shards apply a push: { name = "adagrad", learning_rate = 0.02 }
    n_fetch: int = 1  # steps between fetches (in all experiments of the paper: 1)
    n_push: int = 1  # steps between pushes (in all experiments of the paper: 1)
    # Steps whose mean gradient is one push, from the same parameters: batches that memory has no
    # room for at once. Then n_fetch and n_push are 1.
    accumulate: int = 1
    # Fetch only once every push is applied: with one replica, plain SGD. If n_fetch or n_push is
    # above 1, fetches wait for pushes anyway.
    blocking: bool = False
    # A fetch overwrites the local steps whose gradients are not pushed yet, as in the paper. By
    # default they are repeated from the fetched parameters.
    overwrite_local_steps: bool = False
    # How replicas exchange what they learn; `every` stands for both n_fetch and n_push.
    exchange: ExchangePolicy = DOWNPOUR
    # The optimizer of local steps: a class of torch.optim as "name", and its keywords; its key
    # "schedule" is such a table for a class of torch.optim.lr_scheduler.
    inner: Mapping[str, object] | None = None
    # Several threads in each replica, which share one copy of the parameters; None: one.
    lockfree: LockFree | None = None
    warm_start_steps: int = 0  # steps of replica 0 alone, before the others start
    # Of a replica's own steps between fetches and pushes, before the rule's schedule; by default
    # the rule's. With an adaptive rule it is required if n_fetch > 1; if only n_push > 1, a replica
    # without it takes no steps of its own and only sums gradients.
    local_learning_rate: float | None = None
    # Bound of the 2-norm of each gradient, or of the mean that `accumulate` pushes; None: no bound
    clip_norm: float | None = None
    max_steps: int | None = None  # of each incarnation of a replica; None: until a Stop
    # Gradients in a row with NaN or Inf, each skipped and logged, before a replica gives up.
    non_finite_limit: int = 10
    seed: int = 0  # of the order of samples and of the model's random numbers (dropout)
    # Who reads which samples. "parts": each replica a part of its own, also after others are lost.
    # "dealt": the supervisor deals ranges to those present, by speed, and what a lost one has not
    # pushed to others: each sample of an epoch counts exactly once. None: "dealt" where a job can
    # (`worker.downpour`); without a supervisor there are parts.
    order: Literal["parts", "dealt"] | None = None
    # Of an epoch of dealt samples: once so much of it is done, what is left is not waited for, and
    # dealt to nobody any more (Chilimbi et al. 2014: 0.75).
    epoch_share: float = 1.0

    def __post_init__(self) -> None:
        # msgspec turns a ValueError into an error that names the table.
        for name in (
            "n_fetch",
            "n_push",
            "accumulate",
            "batch_size",
            "non_finite_limit",
            "max_steps",
        ):
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
        if not any(rule.learning_rate for rule in self.rule.rules):
            rate = key_of(self.rule, "learning_rate")
            raise ValueError(f"rule {self.rule.name!r}: {rate} is 0; use a number above 0")
        if self.inner is not None:
            torch_optimizers.check(self.inner, where="inner")
        if not 0.0 < self.epoch_share <= 1.0:
            raise ValueError(f"epoch_share is {self.epoch_share}; use a share above 0, at most 1")
        self.exchange.refuse(self.rule, inner=self.inner is not None, workers=1)
        self._check_pairs()
        if self.counts_in_data:
            self._check_counted()
        if self.lockfree is not None:
            self._check_lockfree(self.lockfree)

    def _check_accumulated(self) -> None:
        exchange = self.exchange
        unfit = {
            "n_fetch or n_push": (self.n_fetch, self.n_push) != (1, 1),
            "exchange.every": exchange.every != 1,
            'exchange.send = "delta"': exchange.send == "delta",
            'exchange.route = "ring"': exchange.route == "ring",
            "exchange.push by factors": exchange.sends_factors,
            "lockfree": self.lockfree is not None,
            "local_learning_rate": self.local_learning_rate is not None,
            "overwrite_local_steps": self.overwrite_local_steps,
        }
        for what, is_given in unfit.items():
            if is_given:
                raise ValueError(
                    f"accumulate is {self.accumulate}, and there is {what}: leave one of them out"
                )

    def _check_pairs(self) -> None:
        if self.accumulate > 1:
            self._check_accumulated()
        is_delta = self.exchange.send == "delta"
        gradients_only = {
            "overwrite_local_steps": "a fetch keeps local steps: leave it out",
            "local_learning_rate": "the inner optimizer has its own rate: give inner that rate",
        }
        for name, fix in gradients_only.items():
            if is_delta and getattr(self, name):
                raise ValueError(f'{name} is given and exchange.send is "delta", where {fix}')
        for name in ("n_fetch", "n_push"):
            if getattr(self, name) > 1 and (is_delta or self.exchange.every != 1):
                raise ValueError(
                    f"{name} is {getattr(self, name)} and exchange.every {self.exchange.every}: "
                    "both say when to exchange: leave one of them out"
                )
        if self.order == "parts" and self.epoch_share != 1.0:
            raise ValueError(
                f'epoch_share is {self.epoch_share} and order is "{self.order}": only of dealt '
                'samples it is known which are left: use order = "dealt"'
            )
        n_fetch = self.n_fetch if self.exchange.every == 1 else self.exchange.every
        rule, has_rate = self.rule, self.local_learning_rate is not None or is_delta
        if (rule.adaptive or rule.groups) and n_fetch != 1 and not has_rate:
            key = "n_fetch" if self.n_fetch > 1 else "exchange.every"
            why = "has groups" if rule.groups else "adapts its rate on the shards"
            raise ValueError(
                f"{key} is {n_fetch} and rule {rule.name!r} {why}; a replica's own steps between "
                f"fetches need a rate: give local_learning_rate, or use {key} = 1"
            )

    def _check_counted(self) -> None:
        exchange = self.exchange
        which = {
            "exchange.round is given": exchange.round is not None,
            'exchange.every is "auto"': exchange.every == "auto",
        }
        counts = [text for rule in self.rule.rules for text in rule.schedule.counted.values()]
        for what, is_so in which.items():
            if is_so:
                raise ValueError(
                    f"rule.schedule has {counts[0]!r}, and {what}, where the samples of a push "
                    "depend on the course: give the schedule numbers of pushes"
                )

    def _check_lockfree(self, lockfree: LockFree) -> None:
        n_threads = lockfree.threads
        n_small = len(lockfree.sizes(self.batch_size, batch_size=self.batch_size))
        if n_small < n_threads:
            raise ValueError(
                f"lockfree.threads is {n_threads}, and a step of batch_size {self.batch_size} has "
                f"{n_small} small batches: use a larger batch_size, or fewer lockfree.samples"
            )
        if self.exchange.route == "ring":
            raise ValueError(
                'lockfree is given and exchange.route is "ring", whose members have the same '
                'bits: leave lockfree out, or use route = "server"'
            )
        if self.inner is None:
            if not self.local_rate:
                raise ValueError(
                    f"lockfree is given and rule {self.rule.name!r} has no rate for steps of a "
                    "replica: give local_learning_rate"
                )
            return
        given = {key for key, value in self.inner.items() if value or key != "momentum"}
        others = sorted(given - {"name", "lr", "weight_decay", "schedule"})
        if self.inner["name"] != "SGD" or others:
            found = ", ".join([str(self.inner["name"]), *others])
            raise ValueError(
                f"lockfree is given and inner is {found}, whose state threads cannot share "
                'without locks: use inner = { name = "SGD", lr = ... }, with weight_decay and '
                "schedule if you like"
            )

    @property
    def counts_in_data(self) -> bool:
        """Whether a schedule is in epochs, samples or steps."""
        return any(rule.schedule.counted for rule in self.rule.rules)

    def in_steps(self, data: DataShard, *, n_replicas: int) -> "DownpourSettings":
        """Return the settings of a replica that reads these samples: `every` counts steps.

        Of dealt samples it reads no part of its own: as many as each of `n_replicas` in the mean.
        """
        if self.exchange.n_epochs is None:
            return self
        if self.order == "dealt":
            placed = None if data.placed is None else data.placed.pieces
            n_push = self.epochs(data.n_samples, placed, n_replicas).n_push
            exchange = msgspec.structs.replace(self.exchange, every=n_push)
        else:
            plan = TrainingPlan(data, batch_size=self.batch_size)
            exchange = self.exchange.steps_of(plan.n_steps(0, len(data)))
        return msgspec.structs.replace(self, exchange=exchange)

    def in_pushes(
        self, n_train: int, *, n_replicas: int, pieces: Pieces | None = None
    ) -> "DownpourSettings":
        """Return the settings with schedules in pushes, of so many training samples."""
        if not self.counts_in_data:
            return self
        # The last batch of an epoch may be short; of dealt samples so may its last push.
        n_push: Fraction | int
        n_steps: float
        n_each: Fraction | float
        if self.order == "dealt":
            epochs, share = self.epochs(n_train, pieces, n_replicas), self.epoch_share
            n_push = epochs.n_push
            n_steps, n_each = epochs.n_batches(0, n_train) * share, epochs.n_pushes * share
        else:
            parts = (
                DataShard(n_train, replica_index=r, n_replicas=n_replicas, seed=0)
                for r in range(n_replicas)
            )
            n_all = sum(
                TrainingPlan(one, batch_size=self.batch_size).n_steps(0, len(one))
                for one in parts
                if len(one)
            )
            n_epochs = self.exchange.n_epochs
            n_push = self.pace.n_push if n_epochs is None else n_epochs * n_all / n_replicas
            n_steps, n_each = n_all, n_all / n_push

        def n_pushes(n: float, unit: str) -> int:
            n_of_epoch = {"epoch": 1, "sample": n_train, "step": n_steps}[unit]
            n_epochs, rest = divmod(n, n_of_epoch)
            n_rest = min(rest / n_of_epoch * n_steps / n_push, n_each)
            return max(1, round(n_epochs * n_each + n_rest))

        return msgspec.structs.replace(self, rule=self.rule.in_pushes(n_pushes))

    def epochs(self, n_samples: int, pieces: Pieces | None = None, n_replicas: int = 1) -> Epochs:
        """Return how dealt samples are cut; the number of replicas is for `every` in epochs."""
        is_placed = pieces is not None and pieces.is_placed
        order = PieceOrder(pieces, seed=self.seed) if pieces is not None and is_placed else None
        batches = Epochs(n_samples=n_samples, batch_size=self.batch_size, pieces=order)
        # Pushes that are fitted to the link, or to others, are of any batches of a range.
        if self.exchange.is_of_any_length:
            return batches
        n_pass = Fraction(batches.n_pushes, n_replicas)
        exchange = self.exchange.steps_of(n_pass)
        pace = msgspec.structs.replace(self, exchange=exchange).pace
        return replace(batches, n_push=pace.n_push)

    def warm_start_left(self, n_done: int, n_samples: int, n_replicas: int) -> int:
        """Return the steps left of the warm start once so many samples are done: by replica 0."""
        n_parts = 1 if self.order == "dealt" else n_replicas
        part = DataShard(n_samples, replica_index=0, n_replicas=n_parts, seed=self.seed)
        plan = TrainingPlan(part, batch_size=self.batch_size)
        return max(0, self.warm_start_steps - plan.n_steps(0, n_done))

    @property
    def pace(self) -> Pace:
        exchange = self.exchange
        every = EVERY_MIN if exchange.every == "auto" else exchange.every
        assert isinstance(every, int), "in_steps comes first"
        return Pace(
            n_fetch=self.n_fetch if every == 1 else every,
            n_push=self.n_push * self.accumulate if every == 1 else every,
            means=self.accumulate > 1,
            norm_max=self.clip_norm if self.accumulate > 1 else None,
            # A worker that waits for others waits for its own push, too, and reads what it wrote.
            blocking=self.blocking or exchange.staleness is not None,
            overwrite_local_steps=self.overwrite_local_steps,
            sends_delta=exchange.send == "delta",
        )

    @property
    def clip_norm_of_step(self) -> float | None:
        """The bound of each gradient by itself."""
        return None if self.accumulate > 1 else self.clip_norm

    @property
    def local_rate(self) -> float:
        """The rate of local steps, before the rule's schedule."""
        if self.local_learning_rate is not None:
            return self.local_learning_rate
        # No rate of an adaptive rule, or of several, would fit a local step.
        has_one = not (self.rule.adaptive or self.rule.groups or self.accumulate > 1)
        return self.rule.learning_rate if has_one else 0.0

    def rate(self, clock: int) -> float:
        """Return the rate of local steps from parameters of this clock."""
        return self.local_rate * self.rule.schedule.factor(clock)
