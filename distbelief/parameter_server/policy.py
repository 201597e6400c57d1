"""How workers exchange what they learn: when, what, and how the shards fold it in.

    step 1 ... every                                        a local step each, with send = "delta"
    push                gradient: their sum; delta: a - x   a: the values of the last exchange
    shard               w := rule(w, weight * damping * push)        each push by itself, or
                        w := rule(w, weighted mean of pushes)        one round of many
    fetch               x := w + (x - a); a := w            local steps since the push are kept
    gate                tick t (from 0) begins if all others have ended t - staleness ticks

A tick of a worker is one exchange. Downpour (Dean et al. 2012) never waits and sends gradients; SSP
(Ho et al. 2013) bounds the staleness; parameter averaging and DiLoCo (Douillard et al. 2023) send
deltas in rounds.
"""

import math
from fractions import Fraction
from typing import Annotated, Literal

import msgspec

from distbelief.core.units import parse_count
from distbelief.parameter_server.codecs import Auto, Bfloat16, Codec, Factors, Int4, Int8
from distbelief.parameter_server.rules import UpdateRule


Numbers = Literal["float32", "bfloat16"]
Fetched = Literal["float32", "bfloat16", "changed"] | Int8 | Int4
# Its examples are for messages.
Every = (
    int
    | Annotated[
        str, msgspec.Meta(pattern=r"^(auto|[0-9.]+ epochs?)$", examples=["auto", "1 epoch"])
    ]
)


class Round(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shards fold one push of each worker, in the order of their names, and apply the result once.

    A round ends when every present worker's push is here, or `grace_seconds` after those of the
    share `quorum` are. A later push belongs to the next round. Each shard has its own rounds: if
    those that it waits for may wait for other shards, it ends a round without them after a while.
    """

    quorum: float = 1.0  # share of the workers that are present
    grace_seconds: float = 0.0
    # Once the share is here, the others push what they have after their step: a slow worker takes
    # fewer local steps in a round, and nobody waits for more than one of them.
    early: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.quorum <= 1.0:
            raise ValueError(f"quorum is {self.quorum}; use a share above 0, and at most 1")
        if not 0.0 <= self.grace_seconds < math.inf:
            raise ValueError(f"grace_seconds is {self.grace_seconds}; use 0 or more")


class ExchangePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [algorithm.exchange] of a job; the keywords of `Exchange` and `ParameterServer`."""

    # Steps between two exchanges; "auto": fitted to the link; "2 epochs": passes of a replica over
    # its own share of the data, in steps once the number of samples is known (`steps_of`).
    every: Every = 1
    send: Literal["gradient", "delta"] = "gradient"  # the sum of gradients, or of local steps
    staleness: int | None = None  # ticks that a worker may be ahead of the slowest; None: any
    round: Round | None = None  # None: shards apply each push by itself
    # Of a push: as it is; divided by the number of workers present; or by its share of their
    # samples.
    weight: Literal["sum", "mean", "samples"] = "sum"
    # Divides a push by 1 + its staleness, or by 1 + what of it is beyond one per other worker.
    damping: Literal["none", "inverse", "excess"] = "none"
    push: Codec | None = None  # how pushes are written; None: as `numbers` says
    # As fetched from another host: all, rounded or not; what has changed since the last fetch, and
    # exactly; or the words by which shards have moved, which move by nothing else. None: as
    # `numbers` says.
    fetch: Fetched | None = None
    numbers: Numbers = "float32"  # as sent, both ways; never in memory
    # Workers save what an encoded push holds back before they send it, with the checkpoints, so
    # that the next incarnation goes on with it. Else what a killed worker holds back is lost.
    durable: bool = False
    # How gradients get together. "server": by the shards. "ring": replicas pass them on to each
    # other, and each applies the rule; shards hold the commits.
    route: Literal["server", "ring"] = "server"
    commit_every: int = 32  # steps between two commits of a ring: what a death repeats at most

    def __post_init__(self) -> None:
        is_count = isinstance(self.every, int) and self.every >= 1
        if not (is_count or self.every == "auto" or self.n_epochs):
            raise ValueError(f'every is {self.every}; use 1 or more, "auto", or "1 epoch"')
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(f"staleness is {self.staleness}; use 0 or more, or leave it out")
        if self.round is not None:
            if self.staleness is None and self.round.quorum == 1.0:
                raise ValueError(
                    "round has quorum 1.0 and staleness is not given: a round that waits for all "
                    "workers ends only if they wait for it: use staleness = 0, or a lower quorum"
                )
            if self.damping != "none":
                raise ValueError(
                    f"damping is {self.damping!r} and there is a round, whose pushes are folded "
                    "into one: leave damping or round out"
                )
            is_fixed = isinstance(self.every, int) and self.every > 1 and self.send == "delta"
            if self.round.early and not (is_fixed and self.round.quorum < 1.0):
                raise ValueError(
                    f"round has early = true, quorum is {self.round.quorum}, every {self.every!r} "
                    f'and send "{self.send}": a late worker pushes fewer local steps than the '
                    'others: use quorum below 1, every of several steps, and send = "delta"'
                )
            if self.weight == "sum" and self.send == "delta":
                raise ValueError(
                    'weight is "sum" and a round of deltas is averaged: use weight = "mean" or '
                    '"samples"'
                )
        if self.durable and (self.push_codec is None or self.sends_factors):
            what = 'of "factors" or "auto"' if self.sends_factors else "not given"
            raise ValueError(
                f"durable is true and push is {what}: such pushes hold nothing back that could "
                "be saved: give another push, or leave durable out"
            )
        if self.commit_every < 1:
            raise ValueError(f"commit_every is {self.commit_every}; use 1 or more")
        if self.route == "ring":
            self._check_ring()
        self._check_factors()
        if self.every == "auto" and self.send == "gradient":
            raise ValueError(
                'every is "auto" and send is "gradient": between exchanges only local steps make '
                'progress: use send = "delta", or a number'
            )

    def _check_factors(self) -> None:
        if self.sends_factors and self.send != "gradient":
            raise ValueError(
                f'push.codec is "factors" or "auto" and send is "{self.send}": factors are those '
                'of gradients: use send = "gradient", or push = { codec = "int4" }'
            )

    def _check_ring(self) -> None:
        # Every member gives to every sum, in every step (Sergeev & Del Balso 2018).
        is_whole = self.round is not None and self.round.quorum == 1.0 and self.staleness == 0
        unfit: dict[str, str | bool] = {
            f'send is "{self.send}"': self.send != "gradient" and 'send = "gradient"',
            f"every is {self.every!r}": self.every != 1 and "every = 1",
            "a round may end without some": not is_whole and "staleness = 0 and round = {}",
            f'weight is "{self.weight}"': self.weight == "samples" and 'weight = "mean" or "sum"',
        }
        for key in ("push", "fetch"):
            if getattr(self, key) is not None:
                unfit[f"{key} is given"] = f"no {key}"
        if self.numbers != "float32":
            unfit[f'numbers is "{self.numbers}"'] = 'numbers = "float32"'
        for what, fix in unfit.items():
            if fix:
                raise ValueError(
                    f'route is "ring" and {what}: a ring sums one whole gradient of each replica '
                    f'in each step: use {fix}, or route = "server"'
                )

    @property
    def n_epochs(self) -> Fraction | None:
        """Passes over a replica's share of the data between two exchanges; None: steps count."""
        count = parse_count(self.every)
        return Fraction(repr(count[0])) if count is not None and count[1] == "epoch" else None

    def steps_of(self, n_pass: Fraction | int) -> "ExchangePolicy":
        """Return the policy of a replica with so many steps in a pass: `every` counts steps.

        A short batch at the end of a pass is a step, and what is left of one counts as a whole.
        """
        if self.n_epochs is None:
            return self
        return msgspec.structs.replace(self, every=max(1, math.ceil(self.n_epochs * n_pass)))

    @property
    def push_codec(self) -> Codec | None:
        """What encodes pushes; None: they are sent as they are."""
        return Bfloat16() if self.push is None and self.numbers == "bfloat16" else self.push

    @property
    def sends_factors(self) -> bool:
        """Whether dense layers go as factors, all or some."""
        return isinstance(self.push, Factors | Auto)

    @property
    def fetched(self) -> Fetched:
        return self.numbers if self.fetch is None else self.fetch

    @property
    def is_of_any_length(self) -> bool:
        """Whether a push may have fewer steps than another."""
        return self.every == "auto" or (self.round is not None and self.round.early)

    @property
    def chosen(self) -> dict[str, object]:
        """The choices that are not the usual ones, as in a table."""
        usual = msgspec.to_builtins(DOWNPOUR)
        own = msgspec.to_builtins(self)
        return {key: value for key, value in own.items() if value != usual[key]}

    @property
    def counts_ticks(self) -> bool:
        """Whether shards must know which workers are there, and how far they are."""
        return (
            self.staleness is not None
            or self.round is not None
            or self.weight != "sum"
            or self.damping == "excess"
        )

    @property
    def divides(self) -> bool:
        """Whether a push that is applied by itself is divided by something."""
        return self.weight != "sum" or self.damping != "none"

    def scale(
        self,
        staleness: int,
        n_clients: int,  # that are in
        n_samples: int,  # of this push
        # Other clients, those that have not pushed yet, and the samples of the rest's last pushes.
        others: tuple[int, int, int],
    ) -> float:
        """Return what multiplies a push that is applied by itself."""
        scale = 1.0
        if self.weight == "mean":
            scale /= n_clients
        elif self.weight == "samples":
            # A client that has pushed nothing yet is taken for one like this.
            n_others, n_unknown, known = others
            total = n_samples * (1 + n_unknown) + known
            scale *= n_samples * (1 + n_others) / (max(total, 1) * n_clients)
        if self.damping == "inverse":
            scale /= 1 + staleness
        elif self.damping == "excess":
            scale /= 1 + max(staleness - (n_clients - 1), 0)
        return scale

    def refuse(self, rule: UpdateRule, *, inner: bool, workers: int) -> None:
        """Raise ValueError if the shards' rule, or an `inner` optimizer, does not fit."""
        if self.send == "gradient" and inner:
            raise ValueError(
                'send is "gradient" and inner is given: the rule of the shards is the optimizer of '
                'gradients: use send = "delta", or leave inner out'
            )
        if self.send == "delta" and not inner:
            raise ValueError(
                'send is "delta" and inner is not given: local steps need an optimizer: give '
                'inner = { name = "SGD", lr = 0.1 }, or use send = "gradient"'
            )
        divides = any(one.name == "delayed_nesterov" for one in rule.rules)
        if divides and self.weight != "sum" and workers > 1:
            way_out = 'weight = "sum"' + ("" if self.round is None else ", and no round")
            raise ValueError(
                f"weight is {self.weight!r} and rule is 'delayed_nesterov', which divides by "
                f"n_pushes itself, so that each push would be divided twice: use {way_out}"
            )
        unfit = [one.name for one in rule.rules if one.has_velocity]
        if self.send == "delta" and self.round is None and unfit and workers > 1:
            raise ValueError(
                f'rule is {unfit[0]!r}, send is "delta" and deltas of {workers} workers are '
                "applied one by one: the velocity would meet deltas from other anchors, and "
                'diverge: use rule = { name = "sgd", learning_rate = 1.0 }, or '
                f'"delayed_nesterov" with n_pushes = {workers} and weight = "sum", or a round'
            )


DOWNPOUR = ExchangePolicy()
