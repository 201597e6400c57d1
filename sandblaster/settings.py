"""Table [algorithm] of a Sandblaster job: the method, and how a batch is divided.

name = "sandblaster"
loss = "cross_entropy"
method = "l-bfgs"          # "conjugate-gradient", "gradient-descent", "owl-qn"
history = 10

[algorithm.warm_start]     # optional: SGD by one replica first, on the same shards
samples = 60000
batch_size = 64
rule = { name = "adagrad", learning_rate = 0.02 }
"""

import math
import re
from typing import Final, Literal

import msgspec

from distbelief.core.formatting import nearest
from distbelief.parameter_server.rules import UpdateRule
from distbelief.worker.downpour_settings import DownpourSettings
from sandblaster.chunks import ChunkSizes
from sandblaster.optimizers import AnyMethod
from sandblaster.optimizers.descent import ConjugateGradient, GradientDescent
from sandblaster.optimizers.lbfgs import LBFGS
from sandblaster.optimizers.owlqn import OWLQN


MethodName = Literal["l-bfgs", "conjugate-gradient", "gradient-descent", "owl-qn"]
METHODS: Final[dict[str, type[AnyMethod]]] = {
    "l-bfgs": LBFGS,
    "conjugate-gradient": ConjugateGradient,
    "gradient-descent": GradientDescent,
    "owl-qn": OWLQN,
}

PROGRAM: Final = "strads"
"""The method that runs the program of the model, in rounds (`sandblaster.strads`)."""

BOUNDS: Final = ("max_iter", "patience", "tol")
"""Arguments of programs that say only when it ends; each has some of them."""

_OF_PROGRAMS: Final = ("loss", "method", "backups", "seed", "portion")

HISTORY: Final = 10

CHUNKS_PER_REPLICA: Final = 16
"""Chunks of a batch per worker, at least: so a worker at half speed costs no time."""

CHUNK_EXAMPLES_MIN: Final = 2048
CHUNK_EXAMPLES_MAX: Final = 4096
"""Examples of a chunk. A push then takes little of the time that computing takes (3 % for
1000 examples, whatever the model: both grow with it). Less than the minimum only where no
worker would get four chunks otherwise."""


class WarmStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [algorithm.warm_start]: SGD first; the other keys are those of "downpour".

    Dean et al. 2012, section 5: all methods begin where SGD of a single replica has come to.
    """

    samples: int  # of all replicas that take part together; each takes an equal share of them
    replicas: Literal["one", "all"] = "one"  # plain SGD by replica 0; or Downpour SGD by all
    batch_size: int  # samples of one step of one replica
    rule: UpdateRule  # how the shards apply a push
    n_fetch: int = 1  # steps between fetches
    n_push: int = 1  # steps between pushes
    clip_norm: float | None = None  # upper bound of each mini-batch gradient's 2-norm
    local_learning_rate: float | None = None

    def __post_init__(self) -> None:
        _at_least(1, "samples", self.samples)
        _at_least(1, "batch_size", self.batch_size)
        self.downpour(loss="", seed=0, n_replicas=1)  # DownpourSettings checks the rest
        if self.rule.ema is not None:
            raise ValueError("rule has ema, and a batch method goes on without: leave it out")
        for rule in self.rule.rules:
            for key, count in rule.schedule.counted.items():
                raise ValueError(f"schedule {key} is {count!r}; use a number of pushes here")

    def n_of(self, n_replicas: int) -> int:
        """Return how many replicas of a job take part, the first of them."""
        return 1 if self.replicas == "one" else n_replicas

    def downpour(self, *, loss: str, seed: int, n_replicas: int) -> DownpourSettings:
        shared = msgspec.structs.asdict(self)
        alone = shared.pop("replicas") == "one"
        share = shared.pop("samples") / (self.batch_size * self.n_of(n_replicas))
        return DownpourSettings(
            loss=loss,
            seed=seed,
            max_steps=math.ceil(share),
            blocking=alone,
            order="parts",
            **shared,
        )


class SandblasterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [algorithm] of a job with name = "sandblaster"."""

    loss: str  # torch's name of it, or an import path (`distbelief.task.losses`)
    method: str = "l-bfgs"  # one of `METHODS`, or "strads": the model is a program
    history: int = HISTORY  # pairs that L-BFGS and OWL-QN remember
    max_iterations: int = 15_000  # bound on accepted points
    max_evaluations: int | None = None  # None: the method's own
    tolerance: float = 1e-5  # ends when no element of the gradient is larger
    # Ends when the relative improvement of the loss stays below it for a few iterations;
    # None: the method's own.
    value_tolerance: float | None = None
    l1: float = 0.0  # penalty l1 |w|_1 of all parameters, biases too (method "owl-qn" only)
    l2: float = 0.0  # penalty l2 / 2 |w|^2 of all parameters
    # File with bounds of parameters (method "l-bfgs" only): tensors lower.NAME and upper.NAME, each
    # of its parameter's shape; what it has not is free
    bounds: str | None = None
    portion: int = 256  # samples of a mini-batch, which a replica computes at once
    # Mini-batches of a chunk, which are summed before they are pushed; None: chosen by batch
    # and replicas.
    portions_per_set: int | None = None
    backups: bool = True  # give idle replicas backup tasks
    warm_start: WarmStart | None = None  # SGD for so many samples first
    seed: int = 0  # of the model's own randomness: each mini-batch's is equal at every point

    def __post_init__(self) -> None:
        _at_least(1, "portion", self.portion)
        _at_least(1, "portions_per_set", self.portions_per_set)
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; use 0 or more")
        if "(" in self.loss and re.search(r"\b(weight|ignore_index)=", self.loss):
            raise ValueError(
                f"loss is {self.loss!r}, which weighs the samples of a chunk, so that a batch's "
                "depends on how it is cut: leave weight and ignore_index out"
            )
        if self.method == PROGRAM:
            self._check_program()
        else:
            self._check_method()
            self.chosen()  # the method checks the rest

    def _check_program(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if field.name not in _OF_PROGRAMS and value != field.default:
                raise ValueError(
                    f"{field.name} is {value!r} with method {PROGRAM!r}: the settings of a program "
                    "are in [model.arguments]; remove it"
                )

    def _check_method(self) -> None:
        if self.method not in METHODS:
            names = [*METHODS, PROGRAM]
            raise ValueError(f"method is {self.method!r}. {nearest(self.method, names)}")
        if self.l1 and self.method != "owl-qn":
            raise ValueError(
                f"l1 is {self.l1} with method {self.method!r}, which needs a smooth loss: "
                'use method = "owl-qn", or l2'
            )
        if not self.l1 and self.method == "owl-qn":
            raise ValueError(
                f"l1 is {self.l1} with method {self.method!r}, which needs that penalty: "
                'use l1 above 0, or method = "l-bfgs"'
            )
        if self.bounds is not None and self.method != "l-bfgs":
            raise ValueError(
                f"bounds is {self.bounds!r} with method {self.method!r}, which has none: "
                'use method = "l-bfgs", or remove bounds'
            )
        if self.bounds is not None and not self.bounds.endswith(".safetensors"):
            raise ValueError(f"bounds is {self.bounds!r}; use the path of a .safetensors file")
        # The default passes: a job file as it ran names every key.
        if self.history != HISTORY and self.method not in {"l-bfgs", "owl-qn"}:
            raise ValueError(
                f"history is {self.history} with method {self.method!r}, which has none: "
                'use method = "l-bfgs", or remove history'
            )

    def chosen(self) -> AnyMethod:
        kind = METHODS[self.method]
        given = {name: getattr(self, name, None) for name in kind.__struct_fields__}
        return msgspec.convert({k: v for k, v in given.items() if v is not None}, kind)

    def chunk_sizes(self, *, n_examples: int, n_replicas: int) -> ChunkSizes:
        """Return how a batch is divided; coordinator and workers must agree on it."""
        if self.portions_per_set is not None:
            n_mini_batches = self.portions_per_set
        else:
            least = min(CHUNK_EXAMPLES_MIN, n_examples // (4 * n_replicas))
            fair = max(n_examples // (CHUNKS_PER_REPLICA * n_replicas), least)
            n_mini_batches = max(1, min(fair, CHUNK_EXAMPLES_MAX) // self.portion)
        return ChunkSizes(mini_batch_size=self.portion, mini_batches_per_chunk=n_mini_batches)


def _at_least(least: int, name: str, value: int | None) -> None:
    if value is not None and value < least:
        raise ValueError(f"{name} is {value}; use {least} or more")
