"""A program of flights whose every number depends on which tables its tasks have taken."""

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import msgspec
import numpy as np
from typing_extensions import override

from distbelief.parameter_server.rows import Rows, Values
from distbelief.protocol.vector_commands import Pull
from sandblaster.optimizers.termination import Reason
from sandblaster.strads.program import Flight, Mark, Program, Pushed, Steps, Task, Types


@final
class Mix(msgspec.Struct, frozen=True):
    seed: int
    before: float  # of the reports of the flight before


@final
class Mixing(Program[int, Mix, Values, list[float]]):
    """Flights of rounds, in which every block takes and adds to any rows of three tables.

    Args:
        staleness: Of each flight.
        n_rounds: Of each flight.
        n_flights: Each ends in a mark, from which the next one can begin.
        seed: Of all that is drawn.
    """

    def __init__(
        self, *, staleness: int, n_rounds: int = 6, n_flights: int = 4, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.n_blocks = 4
        self.tables: Mapping[str, Values] = {
            "long": rng.normal(size=90),
            "pairs": np.abs(rng.normal(size=(40, 2))),
            "short": rng.normal(size=3),
        }
        self.pulls = {"pairs": Pull("divide", 0.5)}
        self.types = Types(argument=Mix, report=Values, state=list[float])
        self._staleness, self._n_rounds, self._n_flights = staleness, n_rounds, n_flights
        self._seed = seed

    @override
    def load(self, block: int) -> int:
        return block

    @override
    def schedule(self, state: object = None) -> Steps[Mix, Values, list[float]]:
        found = [] if state is None else [float(one) for one in state]  # type: ignore[attr-defined] # a list
        while len(found) < self._n_flights:
            before = found[-1] if found else 0.0
            flight = Flight(rounds=self.rounds(len(found), before), staleness=self._staleness)
            reports = yield flight
            found.append(float(np.sin([one[0] * k for k, one in enumerate(reports)]).sum()))
            yield Mark(objective=found[-1], n_updates=len(found), state=[*found])
        yield Mark(
            objective=found[-1], n_updates=len(found), state=found, end=Reason.MAX_ITERATIONS
        )
        return found

    def rounds(self, flight: int, before: float) -> Iterator[Sequence[Task[Mix]]]:
        for number in range(self._n_rounds):
            rng = np.random.default_rng([self._seed, flight, number])
            blocks = [block for block in range(self.n_blocks) if rng.random() < 0.9]
            yield [
                Task(
                    block=block,
                    argument=Mix(int(rng.integers(1 << 30)), before),
                    takes={name: _rows(rng, len(self.tables[name])) for name in self.tables},
                )
                for block in blocks
            ]

    @override
    def push(self, block: int, argument: Mix, taken: Mapping[str, Values]) -> Pushed[Values]:
        rng = np.random.default_rng([argument.seed, block])
        total = sum(float(np.cos(values).sum()) for values in taken.values()) + argument.before
        adds: dict[str, tuple[Rows, Values]] = {}
        for name, table in self.tables.items():
            rows = _rows(rng, len(table))
            shape = np.arange(len(table))[rows].size, *table.shape[1:]
            values = np.sin(total + rng.normal(size=shape))
            adds[name] = rows, np.abs(values) if name == "pairs" else values
        return Pushed(adds=adds, report=np.array([total]))


def _rows(rng: np.random.Generator, n: int) -> Rows:
    if rng.random() < 0.6:  # often the same ones, which a worker has already
        return [slice(0, n), slice(0, n // 2)][int(rng.integers(2))]
    return np.sort(rng.permutation(n)[: int(rng.integers(n))]).astype(np.int64)
