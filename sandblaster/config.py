"""Table [algorithm] of a Sandblaster job: the method, and how a batch is dealt.

    name = "sandblaster"
    loss = "cross_entropy"
    method = "l-bfgs"          # "conjugate-gradient", "gradient-descent", "owl-qn"
    history = 10
    max_iterations = 40

Without `batch_size` a batch is all of the data, so all evaluations are of one function.

A run may begin with Downpour, on the same shards, and end with Sandblaster:

    [algorithm.warm_start]
    samples = 60000
    batch_size = 64
    rule = { name = "adagrad", learning_rate = 0.02 }
"""

import math
from difflib import get_close_matches
from typing import Final, Literal, get_args

import msgspec

from distbelief.parameter_server.optimizers import UpdateRule
from distbelief.worker.config import DownpourSettings
from sandblaster.chunks import ChunkSizes
from sandblaster.optimizers import AnyMethod
from sandblaster.optimizers.conjugate_gradient import ConjugateGradient
from sandblaster.optimizers.gradient_descent import GradientDescent
from sandblaster.optimizers.lbfgs import LBFGS
from sandblaster.optimizers.multi_batch_lbfgs import MultiBatchLBFGS
from sandblaster.optimizers.owlqn import OWLQN


MethodName = Literal["l-bfgs", "conjugate-gradient", "gradient-descent", "owl-qn"]
METHODS: Final = get_args(MethodName)
_OTHER_NAMES: Final = {"cg": "conjugate-gradient"}
"""As scipy calls them, if that is not nearly the same."""

HISTORY: Final = 10
BATCH_MIN: Final = 3
"""Examples: one shared with each of its neighbours, and one of its own."""

CHUNKS_PER_REPLICA: Final = 16
"""Of a batch, at the least: so a replica that is twice as slow costs no time."""

CHUNK_EXAMPLES_MIN: Final = 2048
CHUNK_EXAMPLES_MAX: Final = 4096
"""Of a set: to push it takes little of the time in which it is computed (of one of 1000
3 %, whatever the model: both grow with it). Fewer than the first only if no replica
would get four of them."""


class WarmStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [algorithm.warm_start]: Downpour first, on the same shards.

    Attributes:
        samples: Of all replicas together; each takes an equal share of them.
        batch_size: Samples of one step of one replica.
        rule: How the shards apply a push.
        n_fetch: Steps between fetches.
        n_push: Steps between pushes.
        clip_norm: Upper bound of each mini-batch gradient's 2-norm; None: no bound.
        local_learning_rate: As with algorithm "downpour".
    """

    samples: int
    batch_size: int
    rule: UpdateRule
    n_fetch: int = 1
    n_push: int = 1
    clip_norm: float | None = None
    local_learning_rate: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be run, by name and value.

        Raises:
            ValueError: which msgspec turns into an error that names the table.
        """
        _at_least(1, "samples", self.samples)
        _at_least(1, "batch_size", self.batch_size)
        self.downpour(loss="", seed=0, n_replicas=1)  # checks the rest

    def downpour(self, *, loss: str, seed: int, n_replicas: int) -> DownpourSettings:
        """Return it as the [algorithm] table of one replica's Downpour."""
        return DownpourSettings(
            loss=loss,
            batch_size=self.batch_size,
            rule=self.rule,
            n_fetch=self.n_fetch,
            n_push=self.n_push,
            local_learning_rate=self.local_learning_rate,
            clip_norm=self.clip_norm,
            max_steps=math.ceil(self.samples / (self.batch_size * n_replicas)),
            seed=seed,
        )


class SandblasterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [algorithm] of a job with name = "sandblaster".

    Attributes:
        loss: torch's name of it, or an import path (see `runtime.losses`).
        method: What the coordinator does: one of `METHODS`.
        batch_size: Samples of one batch; None: all of them. Smaller ones need "l-bfgs",
            and each batch shares a part with the one before.
        history: Pairs that L-BFGS and OWL-QN remember; the others remember none.
        max_iterations: Bound on accepted points.
        max_evaluations: Bound on evaluations; None: the method's own.
        tolerance: Ends when no element of the gradient is larger.
        value_tolerance: Ends when the loss has fallen by no more than this share of it
            in a few iterations in a row; None: the method's own. Not for batches.
        l1: Penalty l1 |w|_1 (method "owl-qn" only), of every parameter, biases too.
        l2: Penalty l2 / 2 |w|^2, likewise.
        portion: Samples that a replica computes at once.
        portions_per_set: Portions that are summed before they are pushed; None: chosen
            by batch and replicas.
        backups: Let idle replicas compute again what others are late with.
        warm_start: What comes before, if anything: Downpour for so many samples.
        seed: Of the order of the data where batches are not all of them, and of the
            model's own randomness: each portion has its own, the same at every point.
    """

    loss: str
    method: str = "l-bfgs"
    batch_size: int | None = None
    history: int = HISTORY
    max_iterations: int = 15_000
    max_evaluations: int | None = None
    tolerance: float = 1e-5
    value_tolerance: float | None = None
    l1: float = 0.0
    l2: float = 0.0
    portion: int = 256
    portions_per_set: int | None = None
    backups: bool = True
    warm_start: WarmStart | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be run, by name and value.

        Raises:
            ValueError: which msgspec turns into an error that names the table.
        """
        for name in ("history", "max_iterations", "max_evaluations"):
            _at_least(1, name, getattr(self, name))
        for name in ("portion", "portions_per_set"):
            _at_least(1, name, getattr(self, name))
        _at_least(BATCH_MIN, "batch_size", self.batch_size)
        for name in ("tolerance", "value_tolerance", "l1", "l2"):
            value: float | None = getattr(self, name)
            if value is not None and not 0.0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; use a finite number, 0 or more")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; use 0 or more")
        self._check_method()
        self.chosen()  # checks the rest

    def _check_method(self) -> None:
        """Refuse a method that is none, or that cannot have what is asked for."""
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}{_meant(self.method)}")
        if self.l1 and self.method != "owl-qn":
            raise ValueError(
                f"l1 is {self.l1} with method {self.method!r}, which needs a smooth "
                'loss: use method = "owl-qn", or l2'
            )
        if self.batch_size is not None and self.method != "l-bfgs":
            raise ValueError(
                f"batch_size is {self.batch_size} with method {self.method!r}, which "
                'compares losses of one function: use method = "l-bfgs", or leave '
                "batch_size out"
            )
        if not self.l1 and self.method == "owl-qn":
            raise ValueError(
                f"l1 is {self.l1} with method {self.method!r}, which is for a loss "
                'with this penalty: use l1 above 0, or method = "l-bfgs"'
            )
        self._check_effect()

    def _check_effect(self) -> None:
        """Refuse what would have no effect.

        The default says nothing: a job file as it ran names every key.
        """
        remembers = self.method in {"l-bfgs", "owl-qn"}
        if self.history != HISTORY and not remembers:
            raise ValueError(
                f"history is {self.history} with method {self.method!r}, which "
                'remembers no pairs: use method = "l-bfgs", or leave history out'
            )
        if self.value_tolerance and self.batch_size is not None:
            raise ValueError(
                f"value_tolerance is {self.value_tolerance} with batch_size "
                f"{self.batch_size}: losses of different batches say nothing about "
                "progress: use tolerance, or leave value_tolerance or batch_size out"
            )

    def chosen(self) -> AnyMethod:
        """Return the method, as the coordinator runs it."""
        given = {
            "gradient_tolerance": self.tolerance,
            "n_iterations_max": self.max_iterations,
            "l2": self.l2,
        }
        if self.max_evaluations is not None:
            given["n_evaluations_max"] = self.max_evaluations
        if self.value_tolerance is not None:
            given["value_tolerance"] = self.value_tolerance
        match self.method:
            case "l-bfgs" if self.batch_size is not None:
                given |= {"n_history": self.history, "batch_size": self.batch_size}
                return msgspec.convert(given, MultiBatchLBFGS)
            case "l-bfgs":
                return msgspec.convert(given | {"n_history": self.history}, LBFGS)
            case "owl-qn":
                given |= {"n_history": self.history, "l1": self.l1}
                return msgspec.convert(given, OWLQN)
            case "conjugate-gradient":
                return msgspec.convert(given, ConjugateGradient)
            case _:
                return msgspec.convert(given, GradientDescent)

    @property
    def order_seed(self) -> int | None:
        """Of the order of the data; None: as they come, which is the quickest."""
        return None if self.batch_size is None else self.seed

    def chunk_sizes(self, *, n_examples: int, n_replicas: int) -> ChunkSizes:
        """Return how a batch is cut: the same for coordinator and replicas.

        Args:
            n_examples: Of the training data.
            n_replicas: Of the job.
        """
        if self.portions_per_set is not None:
            n_mini_batches = self.portions_per_set
        else:
            batch = min(self.batch_size or n_examples, n_examples)
            least = min(CHUNK_EXAMPLES_MIN, batch // (4 * n_replicas))
            fair = max(batch // (CHUNKS_PER_REPLICA * n_replicas), least)
            n_mini_batches = max(1, min(fair, CHUNK_EXAMPLES_MAX) // self.portion)
        return ChunkSizes(mini_batch_size=self.portion, mini_batches_per_chunk=n_mini_batches)


def _at_least(least: int, name: str, value: int | None) -> None:
    if value is not None and value < least:
        raise ValueError(f"{name} is {value}; use {least} or more")


def _meant(method: str) -> str:
    """Return what helps whoever wrote a method that is none."""
    name = method.lower()
    near = [_OTHER_NAMES[name]] if name in _OTHER_NAMES else []
    near = near or get_close_matches(name, METHODS, n=1)
    if near:
        return f". Did you mean {near[0]!r}?"
    return f"; it must be one of {', '.join(METHODS)}"
