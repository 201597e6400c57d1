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

The machines of one replica push parts of that vector, each its own ranges, under one
grant: they are put together here. Whether all of them have come, their leader knows; it
says so to the coordinator, before that orders to fold.

Memory: one vector for each set that is staged, and for each node without its sibling:
of n sets folded in order that is log2 n, and a gap that is left open costs log2 n more.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from distbelief.core.vectors import Element, Vector
from distbelief.errors import RemoteProtocolError
from distbelief.parameter_server.slices import ShardSlice


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """What was pushed under one grant.

    Attributes:
        total: Sum of gradients, then buffers.
        n_examples: Of the set.
        parts: Keys of what has come of it; None if it came whole.
    """

    total: Vector
    n_examples: int
    parts: set[bytes] | None


@final
class GradientSums:
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

    def __init__(self, *, n_elements: int, n_gradient: int, dtype: np.dtype[Element]) -> None:
        self._n_elements = n_elements
        self._n_gradient = n_gradient
        self._dtype = dtype
        self._staged: dict[int, _Staged] = {}  # by grant
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
        self._free += [staged.total for staged in self._staged.values()]
        self._free += self._nodes.values()
        self._staged.clear()
        self._nodes.clear()
        self._folded.clear()
        self._void.clear()
        self.n_examples = self.digest = 0
        self._is_open = False

    # ---------------------------------------------------------------------- staging

    def wants(self, pushed: Vector, *, grant: int, holding: ShardSlice | None = None) -> bool:
        """Return whether this push is to be staged; count it if not.

        Not if it is of another evaluation, void, known, one too many, or of another
        size or type. A grant of which one part was refused is void: no other part of it
        is taken, so what is folded has no holes.

        Args:
            pushed: The sum of a set, or a part of it.
            grant: Under which it was pushed.
            holding: Which part it is; None: all of it.
        """
        is_whole = holding is None or holding.ranges is None
        n_elements = self._n_elements if holding is None else holding.n_elements
        is_current = (
            self._is_open
            and grant >= self._first_grant
            and grant not in self._void
            and grant not in self._folded.values()
        )
        known = self._staged.get(grant)
        if known is None:
            has_room = len(self._staged) < self._n_staged_max
        else:
            key = b"" if holding is None else holding.key
            has_room = known.parts is not None and key not in known.parts
            has_room &= not is_whole
        fits = pushed.shape == (n_elements,) and pushed.dtype == self._dtype
        wanted = is_current and has_room and fits
        if is_current and known is None and not (wanted or is_whole):
            self._void.add(grant)
        self.n_refused += not wanted
        return wanted

    def staging(
        self,
        pushed: Vector,
        *,
        grant: int,
        n_examples: int,
        holding: ShardSlice | None = None,
        buffers: Vector | None = None,
    ) -> Callable[[], None]:
        """Return the work that stages what was pushed, and is wanted.

        Args:
            pushed: The sum of a set, or a part of it.
            grant: Under which it was pushed.
            n_examples: Of the set.
            holding: Which part it is; None: all of it.
            buffers: What those are that no part of it has; by default zeros.
        """
        known, is_first = self._staged.get(grant), False
        if known is None:
            is_part, is_first = holding is not None and holding.ranges is not None, True
            known = _Staged(self._room(), n_examples, set() if is_part else None)
            self._staged[grant] = known
        total, n = known.total, self._n_gradient
        if known.parts is None or holding is None:
            return lambda: np.copyto(total, pushed)
        known.parts.add(holding.key)

        def work() -> None:
            if is_first:
                total[:n] = 0.0
                total[n:] = 0.0 if buffers is None else buffers
            holding.lay(pushed, total)

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
                    f"which this shard does not hold; it holds {sorted(self._staged)}"
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
                self._free.append(staged.total)

    def fold(self, set_index: int, grant: int) -> None:
        """Let a staged set count."""
        staged = self._staged.pop(grant)
        node = staged.total
        self._folded[set_index] = grant
        self.n_examples += staged.n_examples
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
        return self._free.pop() if self._free else np.zeros(self._n_elements, self._dtype)
