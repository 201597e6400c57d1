"""What takes part in Figures 4 and 5: methods, and with how many replicas.

What is to be chosen for each (`setting`) is a learning rate; of Sandblaster, how many
pairs it remembers. `search` tries as many for each.
"""

from collections.abc import Mapping
from typing import Final, Literal, final

import msgspec

from experiments.figures.rig import BATCH
from experiments.figures.task import N_TRAIN


Kind = Literal["sgd", "adagrad", "l-bfgs"]

PORTION: Final = 32

LEARNERS: Final = 8
"""Replicas by which Sandblaster learns, however many it is priced for: `batched`."""

NAMES: Final[Mapping[Kind, str]] = {
    "sgd": "Downpour",
    "adagrad": "Downpour + Adagrad",
    "l-bfgs": "Sandblaster L-BFGS",
}


@final
class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A method with so many replicas."""

    kind: Kind  # of the method
    replicas: int  # model replicas
    candidates: tuple[float, ...]  # settings to choose from
    samples: int  # it ends after so many
    every: float  # seconds of the large cluster between evaluations
    stops: bool = True  # whether it may end once it is well above the target
    haste: float = 20.0  # how many times as fast time runs

    @property
    def name(self) -> str:
        alone = self.kind == "sgd" and self.replicas == 1
        return "SGD" if alone else NAMES[self.kind]

    @property
    def label(self) -> str:
        return f"{self.name} [{self.replicas}]"

    def algorithm(self, setting: float, *, squares: float) -> str:
        """Return table [algorithm] of a job.

        Args:
            setting: One of the candidates, for example.
            squares: Of gradients, that Adagrad has seen already.
        """
        if self.kind == "l-bfgs":
            return (
                'name = "sandblaster"\nmethod = "l-bfgs"\n'
                f"history = {int(setting)}\n{cutting(self.replicas)}"
            )
        rule = f'name = "{self.kind}", learning_rate = {setting}'
        if self.kind == "adagrad":
            rule += f", initial_accumulator = {squares}"
        return f'name = "downpour"\nbatch_size = {BATCH}\nrule = {{ {rule} }}'


def cutting(n_replicas: int) -> str:
    """Return how a batch, all samples, is cut: so that each replica pushes twice.

    That is 32 samples at a time, at least: once for each of 2,000 replicas, and 48.
    """
    if n_replicas == LEARNERS:
        return "portion = 2048\nportions_per_set = 1"
    n_portions = max(1, N_TRAIN // (2 * PORTION * n_replicas))
    return f"portion = {PORTION}\nportions_per_set = {n_portions}"


def _fixed(replicas: int, *candidates: float, samples: int = 34_000, stops: bool = True) -> Entry:
    return Entry(
        kind="sgd",
        replicas=replicas,
        candidates=candidates,
        samples=samples,
        every=200.0 if replicas == 1 else 600.0 / replicas,
        stops=stops,
    )


def _adaptive(
    replicas: int, *candidates: float, samples: int = 34_000, stops: bool = True
) -> Entry:
    return Entry(
        kind="adagrad",
        replicas=replicas,
        candidates=candidates,
        samples=samples,
        every=600.0 / replicas,
        stops=stops,
    )


def _batched(replicas: int) -> Entry:
    return Entry(
        kind="l-bfgs",
        replicas=replicas,
        candidates=(5, 10, 20, 40),
        samples=30 * N_TRAIN,
        every=400.0 if replicas == LEARNERS else 20.0,
        haste=200.0,
    )


LEARNER: Final = _batched(LEARNERS)

FIGURE_4: Final = (
    _fixed(1, 0.0025, 0.005, 0.01, 0.02, samples=34_000, stops=False),
    _fixed(20, 0.00125, 0.0025, 0.005, 0.01, samples=38_000, stops=False),
    _adaptive(20, 0.005, 0.01, 0.02, 0.04, samples=38_000, stops=False),
    _adaptive(200, 0.0005, 0.001, 0.002, 0.004, samples=96_000, stops=False),
    _batched(2000),
    _batched(1000),
)
"""The paper's, but for its GPU; and Sandblaster with half as many replicas as there."""

FIGURE_5: Final = (
    _fixed(5, 0.0025, 0.005, 0.01, 0.02),
    _fixed(10, 0.00125, 0.0025, 0.005, 0.01),
    FIGURE_4[1],
    _fixed(40, 0.000625, 0.00125, 0.0025, 0.005),
    _adaptive(10, 0.005, 0.01, 0.02, 0.04),
    FIGURE_4[2],
    _adaptive(50, 0.0025, 0.005, 0.01, 0.02),
    FIGURE_4[3],
    _batched(100),
    _batched(300),
    FIGURE_4[5],
    FIGURE_4[4],
)
"""Four of each, as in the paper, which does not name them all."""
