"""A long random search over a planner's candidates: what its plans are measured by.

It knows nothing of how the planner searches, and half of its moves change neighbours
together, to splits that are called alike, which the planner's own moves do not.
"""

from collections.abc import Callable, Sequence
from typing import Final, final

import numpy as np

from distbelief.partition.solvers.problem import Choice, Problem


SecondsOf = Callable[[Choice], float]

_N_DRAWN: Final = 3
_PATIENCE: Final = 40
"""Moves in a row without a gain, after which it begins elsewhere."""


def search(
    problem: Problem,
    words: Sequence[Sequence[str]],
    seconds_of: SecondsOf,
    starts: Sequence[Choice],
    *,
    tries: int,
    seed: int,
) -> float:
    """Return the seconds of the best choice that is found.

    Args:
        problem: Whose candidates there are.
        words: What they are called, of each node.
        seconds_of: Prices a choice; infinite for what does not fit.
        starts: Where to begin, one after the other; then at random.
        tries: How many choices are priced.
        seed: Of all chance.
    """
    draws = _Draws(problem, words, seed=seed)
    waiting = list(starts)
    best = now = np.inf
    choice: Choice | None = None
    failed = 0
    for _ in range(tries):
        if choice is None or failed >= _PATIENCE:
            choice = waiting.pop(0) if waiting else draws.start()
            now, failed = seconds_of(choice), 0
        else:
            other = draws.move(choice)
            seconds = seconds_of(other)
            failed = 0 if seconds < now else failed + 1
            if seconds <= now:
                choice, now = other, seconds
        best = min(best, now)
    return float(best)


@final
class _Draws:
    """Random choices and moves."""

    def __init__(self, problem: Problem, words: Sequence[Sequence[str]], *, seed: int) -> None:
        self._problem = problem
        self._places = [{word: index for index, word in enumerate(row)} for row in words]
        self._words = words
        self._rng = np.random.default_rng(seed)

    def start(self) -> Choice:
        """Return a choice of few words: every run of nodes is split alike."""
        choice = tuple(int(self._rng.integers(n)) for n in self._problem.sizes)
        node = 0
        while node < len(choice):
            choice = self._alike(choice, node, until=self._end(node))
            node = self._end(node)
        return choice

    def move(self, choice: Choice) -> Choice:
        """Return a choice in which a node, or a run of nodes, is split otherwise."""
        node = int(self._rng.integers(len(choice)))
        changed = (*choice[:node], self._drawn(choice, node), *choice[node + 1 :])
        if self._rng.random() < 0.5:
            return changed
        return self._alike(changed, node, until=self._end(node))

    def _end(self, node: int) -> int:
        return node + 1 + int(self._rng.geometric(0.25))

    def _drawn(self, choice: Choice, node: int) -> int:
        """Return, of a few candidates, the one that the solver's model likes best."""
        totals = self._problem.costs[node]
        for neighbour, table in self._problem.neighbours[node]:
            totals = totals + table[:, choice[neighbour]]
        drawn = self._rng.integers(len(totals), size=_N_DRAWN)
        return int(min(drawn, key=lambda index: totals[index]))

    def _alike(self, choice: Choice, node: int, *, until: int) -> Choice:
        word = self._words[node][choice[node]]
        changed = list(choice)
        for other in range(node + 1, min(until, len(choice))):
            changed[other] = self._places[other].get(word, changed[other])
        return tuple(changed)
