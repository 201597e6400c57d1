"""Sums of portions as a shard gathers them: staged, then folded into one tree.

A set of portions is pushed as one vector: the sum of their gradients, then the buffers.
It is *staged* under the number of its grant, and counts only once it is *folded*, which
a coordinator orders when every shard holds it. So every shard counts the same try at
each set, whoever died between two pushes (Dean & Ghemawat 2004, section 3.3, leave that
open for tasks that are not deterministic).

    set            0   1   2   3   4   5         n = 6
    level 1        (0 + 1) (2 + 3) (4 + 5)       siblings meet as soon as both are there
    level 2        ((0 + 1) + (2 + 3))
    at the end     ((0 + 1) + (2 + 3)) + (4 + 5)

The tree depends on nothing but the index of a set, so the sum has the same bits in
whatever order sets arrive; addition in order of arrival gave 20 results in 20 orders.
Its error grows with the logarithm of n. Buffers are not summed: those of the last set
stay, as sequential training leaves those of the last batch.

Memory: one vector for each set that is staged, and for each node without its sibling:
of n sets folded in order that is log2 n, and a gap that is left open costs log2 n more.
"""

from collections.abc import Callable, Collection
from typing import final

import numpy as np
import torch

from distbelief.errors import RemoteProtocolError
from distbelief.vectors import Element, Vector


@final
class Collecting:
    """The sets of one evaluation, on one shard.

    Args:
        n_elements: Of a pushed vector, buffers included.
        n_gradient: How many of them are gradient.
        dtype: Of the elements.

    Attributes:
        n_folded: Sets that count.
        n_examples: In those.
        digest: Exclusive or of their grants.
        n_refused: Pushes that were none of this evaluation's.
    """

    def __init__(
        self, *, n_elements: int, n_gradient: int, dtype: np.dtype[Element]
    ) -> None:
        self._n_elements = n_elements
        self._n_gradient = n_gradient
        self._dtype = dtype
        self._staged: dict[int, tuple[Vector, int]] = {}  # grant -> sum, n_examples
        self._void: set[int] = set()
        self._nodes: dict[tuple[int, int], Vector] = {}  # (level, index) -> sum
        self._folded: dict[int, int] = {}  # set index -> grant
        self._free: list[Vector] = []
        self._first_grant = 0
        self._n_staged_max = 0
        self._is_open = False
        self.n_examples = 0
        self.digest = 0
        self.n_refused = 0

    @property
    def n_folded(self) -> int:
        """Sets that count."""
        return len(self._folded)

    @property
    def n_vectors(self) -> int:
        """How much memory it takes, in vectors."""
        return len(self._staged) + len(self._nodes) + len(self._free)

    def open(self, *, first_grant: int, n_staged_max: int) -> None:
        """Begin an evaluation; forget what is left of another."""
        self.close()
        self._first_grant, self._n_staged_max = first_grant, n_staged_max
        self._is_open = True

    def close(self) -> None:
        """Forget everything; take nothing more. Room is kept for the next time."""
        self._free += [vector for vector, _ in self._staged.values()]
        self._free += self._nodes.values()
        self._staged.clear()
        self._nodes.clear()
        self._folded.clear()
        self._void.clear()
        self.n_examples = self.digest = 0
        self._is_open = False

    # ---------------------------------------------------------------------- staging

    def wants(self, pushed: Vector, *, grant: int) -> bool:
        """Return whether this push is to be staged; count it if not.

        Not if it is of another evaluation, void, known, one too many, or but a part of
        what the shard holds: nobody would put such parts together.
        """
        wanted = (
            self._is_open
            and pushed.shape == (self._n_elements,)
            and pushed.dtype == self._dtype
            and grant >= self._first_grant
            and grant not in self._void
            and grant not in self._staged
            and grant not in self._folded.values()
            and len(self._staged) < self._n_staged_max
        )
        self.n_refused += not wanted
        return wanted

    def staging(
        self, pushed: Vector, *, grant: int, n_examples: int
    ) -> Callable[[], None]:
        """Return the work that stages what was pushed, and is wanted."""
        room = self._room()
        self._staged[grant] = room, n_examples

        def work() -> None:
            room[:] = pushed

        return work

    # ---------------------------------------------------------------------- folding

    def check(self, sets: Collection[tuple[int, int]]) -> None:
        """Raise if one of these (set index, grant) cannot be folded; change nothing.

        Raises:
            RemoteProtocolError: it is not held, or its set counts already.
        """
        for set_index, grant in sets:
            if grant not in self._staged:
                raise RemoteProtocolError(
                    f"set {set_index} is to be counted as pushed under grant {grant}, "
                    f"which this shard does not hold; it holds {sorted(self._staged)}, "
                    "and each replica has to push whole gradients"
                )
            if set_index in self._folded:
                raise RemoteProtocolError(
                    f"set {set_index} is to be counted under grant {grant}, and counts "
                    f"already, under grant {self._folded[set_index]}"
                )

    def forget(self, grants: Collection[int]) -> None:
        """Forget what was, or will be, pushed under these grants."""
        self._void.update(grants)
        for grant in grants:
            staged = self._staged.pop(grant, None)
            if staged is not None:
                self._free.append(staged[0])

    def fold(self, set_index: int, grant: int) -> None:
        """Let a staged set count."""
        node, n_examples = self._staged.pop(grant)
        self._folded[set_index] = grant
        self.n_examples += n_examples
        self.digest ^= grant
        level, index = 0, set_index
        while (sibling := self._nodes.pop((level, index ^ 1), None)) is not None:
            node = self._add(sibling, node) if index % 2 else self._add(node, sibling)
            level, index = level + 1, index // 2
        self._nodes[level, index] = node

    def total(self) -> Vector | None:
        """Return the sum of all that counts, (n_elements,), its own; None of nothing.

        To be called once, when no set is missing: it adds up the nodes that have no
        sibling, from left to right.
        """
        nodes = sorted(
            self._nodes.items(), key=lambda item: item[0][1] << item[0][0]
        )  # by the first set in each
        self._nodes.clear()
        total: Vector | None = None
        for _, node in nodes:
            total = node if total is None else self._add(total, node)
        if total is not None:
            self._free.append(total)
        return total

    def _add(self, left: Vector, right: Vector) -> Vector:
        """Return left + right in the memory of `left`; `right` is free."""
        n = self._n_gradient
        torch.from_numpy(left[:n]).add_(torch.from_numpy(right[:n]))
        left[n:] = right[n:]
        self._free.append(right)
        return left

    def _room(self) -> Vector:
        return (
            self._free.pop() if self._free else np.zeros(self._n_elements, self._dtype)
        )
