"""Phone states: what the network is asked for in every frame.

The names are `mono` and `cdN`:

    mono   phone x {begin, middle, end}, always 210 states. The 69 commonest phones have
           their own; the rest share the 70th, so that the number stays as it is when
           another release of Python brings other sentences.
    cdN    context-dependent, exactly N states: every mono state, and the N - 210
           commonest states with a left and right, or only a left, neighbour. A frame
           takes the most specific state there is: left-phone-right, left-phone, phone.
           Tying by counts with back-off stands in for the decision trees of Young,
           Odell and Woodland (1994), which need questions about phonetics.

Counts come from the train part alone. Letters in shapes: P is N_PHONES, S positions.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.speech.errors import SpeechError
from experiments.speech.session import N_POSITIONS


N_PHONES = 70
REST = N_PHONES - 1  # the number that rare and unseen phones share
N_MONO = N_PHONES * N_POSITIONS
SHAPE = (N_PHONES, N_PHONES, N_PHONES, N_POSITIONS)
Contexts = NDArray[np.int16]  # (frames, 4): left, phone, right, position


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    phones: tuple[str, ...]  # at most 69, commonest first
    n_states: int
    states: NDArray[np.int32]  # (P, P, P, S), by left, phone, right, position

    def label(self, contexts: Contexts, *, names: Sequence[str]) -> NDArray[np.int32]:
        """The state of every frame, (frames,); contexts are (frames, 4), indices into the names."""
        left, phone, right, position = _translate(contexts, names, self.phones)
        return self.states[left, phone, right, position]


def derive(labels: str, *, contexts: Contexts, names: Sequence[str]) -> Inventory:
    """The labelling "mono" or "cdN", as "cd8192", counted on the frames of the train part.

    Contexts are (frames, 4), indices into the names of phones.
    """
    n_states = count_states(labels)
    frames = np.bincount(contexts[:, 1], minlength=len(names))
    order = sorted(range(len(names)), key=lambda phone: (-frames[phone], names[phone]))
    phones = tuple(names[phone] for phone in order[:REST])

    cells = _translate(contexts, names, phones)
    code = np.ravel_multi_index(cells, SHAPE)
    counts = np.bincount(code, minlength=np.prod(SHAPE)).reshape(SHAPE)
    states = _tie(counts, n_states=n_states)
    return Inventory(phones=phones, n_states=n_states, states=states)


def count_states(labels: str) -> int:
    if labels == "mono":
        return N_MONO
    match = re.fullmatch(r"cd([0-9]+)", labels)
    if match is None or int(match[1]) < N_MONO:
        raise SpeechError(
            f"labels = {labels!r} is no labelling: write 'mono' or 'cdN' with N of at "
            f"least {N_MONO}, for instance 'cd8192'"
        )
    return int(match[1])


def _translate(
    contexts: Contexts, names: Sequence[str], phones: Sequence[str]
) -> tuple[NDArray[np.int64], ...]:
    numbers = {phone: number for number, phone in enumerate(phones)}
    table = np.array([numbers.get(name, REST) for name in names], np.int64)
    neighbours = (table[contexts[:, column]] for column in range(3))
    return (*neighbours, contexts[:, 3].astype(np.int64))


def _tie(counts: NDArray[np.int64], *, n_states: int) -> NDArray[np.int32]:
    """Give the commonest contexts, (P, P, P, S), states of their own, others their back-off's."""
    mono = np.arange(N_MONO, dtype=np.int32).reshape(1, N_PHONES, 1, N_POSITIONS)
    states = np.broadcast_to(mono, SHAPE).copy()
    by_left = counts.sum(axis=2)  # (P, P, S)
    frames = np.concatenate([by_left.ravel(), counts.ravel()])
    commonest = np.argsort(-frames, kind="stable")[: n_states - N_MONO]
    commonest = commonest[frames[commonest] > 0]
    chosen = np.sort(commonest)  # left contexts come first, full ones refine them
    for state, cell in enumerate(chosen.tolist(), start=N_MONO):
        if cell < by_left.size:
            left, phone, position = np.unravel_index(cell, by_left.shape)
            states[left, phone, :, position] = state
        else:
            states.flat[cell - by_left.size] = state
    return states
