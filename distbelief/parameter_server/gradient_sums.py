"""Gradient sums of chunks: staged per attempt, then committed into one ordered tree.

    chunk          0   1   2   3   4   5         n = 6
    level 1        (0 + 1) (2 + 3) (4 + 5)       siblings are added as soon as both are there
    level 2        ((0 + 1) + (2 + 3))
    at the end     ((0 + 1) + (2 + 3)) + (4 + 5)

A pushed sum is staged under its commit token and counts only once the coordinator commits it on
every shard. So all shards count the same attempt (Dean & Ghemawat 2004, section 3.3, leave this
open for non-deterministic tasks). The tree depends on chunk indices only, not on the order of
arrival, so the sum is bit-identical; its error grows with log n.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import final

import msgspec
import numpy as np
import torch

from distbelief.core.errors import RemoteProtocolError
from distbelief.core.vectors import Element, Vector
from distbelief.parameter_server.slices import ShardSlice


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    total: Vector  # gradient sums, then buffers
    n_examples: int
    is_whole: bool  # pushed in one
    parts: set[bytes] = field(default_factory=set)  # keys of the received slices


class SumsState(msgspec.Struct, frozen=True, kw_only=True):
    """All that `GradientSums` has, but free memory and what it counts for the screen."""

    staged: dict[int, _Staged]
    void: set[int]
    nodes: dict[tuple[int, int], Vector]
    committed: dict[int, int]
    first_token: int
    n_staged_max: int
    is_open: bool
    n_examples: int
    digest: int


@final
class GradientSums:
    """The chunk sums of one evaluation on one shard.

    Memory: one vector per staged chunk and per tree node without its sibling, which is log2 n for
    n chunks committed in order.
    """

    def __init__(self, *, n_elements: int, n_gradient: int, dtype: np.dtype[Element]) -> None:
        self._n_elements = n_elements  # of a pushed vector: the gradient, then buffers
        self._n_gradient = n_gradient
        self._dtype = dtype
        self._staged: dict[int, _Staged] = {}  # by commit token
        self._void: set[int] = set()
        self._nodes: dict[tuple[int, int], Vector] = {}  # (level, index) -> sum
        self._committed: dict[int, int] = {}  # chunk index -> commit token
        self._free: list[Vector] = []
        self._first_token = 0
        self._n_staged_max = 0
        self._is_open = False
        self.n_examples = 0  # examples in the committed chunks
        self.digest = 0  # XOR of their commit tokens
        self.n_refused = 0  # pushes that do not belong to this evaluation

    @property
    def n_committed(self) -> int:
        return len(self._committed)

    @property
    def n_vectors(self) -> int:
        return len(self._staged) + len(self._nodes) + len(self._free)

    def state(self) -> SumsState:
        return SumsState(
            staged=self._staged,
            void=self._void,
            nodes=self._nodes,
            committed=self._committed,
            first_token=self._first_token,
            n_staged_max=self._n_staged_max,
            is_open=self._is_open,
            n_examples=self.n_examples,
            digest=self.digest,
        )

    def adopt(self, state: SumsState) -> None:
        self._staged, self._void, self._nodes = state.staged, state.void, state.nodes
        self._committed, self._first_token = state.committed, state.first_token
        self._n_staged_max, self._is_open = state.n_staged_max, state.is_open
        self.n_examples, self.digest = state.n_examples, state.digest

    def open(self, *, first_commit_token: int, n_staged_max: int) -> None:
        """Begin an evaluation; drop what another one left."""
        self.close()
        self._first_token, self._n_staged_max = first_commit_token, n_staged_max
        self._is_open = True

    def close(self) -> None:
        """Drop everything and accept nothing; the memory is kept for the next evaluation."""
        self._free += [*(staged.total for staged in self._staged.values()), *self._nodes.values()]
        for table in (self._staged, self._nodes, self._committed, self._void):
            table.clear()
        self.n_examples = self.digest = 0
        self._is_open = False

    def wants(self, pushed: Vector, *, commit_token: int, shard_slice: ShardSlice) -> bool:
        """Return whether this push, of `shard_slice` of the sum, must be staged."""
        is_whole, known = shard_slice.ranges is None, self._staged.get(commit_token)
        is_current = (
            self._is_open
            and commit_token >= self._first_token
            and commit_token not in self._void
            and commit_token not in self._committed.values()
        )
        if known is None:
            has_room = len(self._staged) < self._n_staged_max
        else:
            has_room = not (is_whole or known.is_whole) and shard_slice.key not in known.parts
        fits = pushed.shape == (shard_slice.n_elements,) and pushed.dtype == self._dtype
        wanted = is_current and has_room and fits
        # One refused part voids the token: without it the committed sum would have a hole.
        if is_current and known is None and not (wanted or is_whole):
            self._void.add(commit_token)
        self.n_refused += not wanted
        return wanted

    def stage_work(
        self,
        pushed: Vector,
        *,
        commit_token: int,
        n_examples: int,
        shard_slice: ShardSlice,
        buffers: Vector | None = None,  # where no part has any; None: zeros
    ) -> Callable[[], None]:
        """Return the work that stages a wanted push: the sum of a chunk, or a part of it."""
        known = self._staged.get(commit_token)
        is_first_part = known is None and shard_slice.ranges is not None
        if known is None:
            room = self._free.pop() if self._free else np.zeros(self._n_elements, self._dtype)
            known = _Staged(room, n_examples, is_whole=shard_slice.ranges is None)
            self._staged[commit_token] = known
        known.parts.add(shard_slice.key)
        total, n = known.total, self._n_gradient

        def work() -> None:
            if is_first_part:
                total[:n] = 0.0
                total[n:] = 0.0 if buffers is None else buffers
            shard_slice.scatter(pushed, total)

        return work

    def check(self, chunks: Collection[tuple[int, int]]) -> None:
        """Raise RemoteProtocolError unless all (chunk index, commit token) can be committed."""
        for chunk_index, commit_token in chunks:
            if commit_token in self._staged and chunk_index not in self._committed:
                continue
            why_not = f"this shard has staged tokens {sorted(self._staged)}"
            if commit_token in self._staged:
                why_not = f"it is committed with token {self._committed[chunk_index]}"
            raise RemoteProtocolError(
                f"cannot commit chunk {chunk_index} with token {commit_token}: {why_not}"
            )

    def forget(self, commit_tokens: Collection[int]) -> None:
        """Drop what was or will be pushed with these commit tokens."""
        self._void.update(commit_tokens)
        for commit_token in commit_tokens:
            staged = self._staged.pop(commit_token, None)
            if staged is not None:
                self._free.append(staged.total)

    def commit(self, chunk_index: int, commit_token: int) -> None:
        staged = self._staged.pop(commit_token)
        node = staged.total
        self._committed[chunk_index] = commit_token
        self.n_examples += staged.n_examples
        self.digest ^= commit_token
        level, index = 0, chunk_index
        while (sibling := self._nodes.pop((level, index ^ 1), None)) is not None:
            node = self._add(sibling, node) if index % 2 else self._add(node, sibling)
            level, index = level + 1, index // 2
        self._nodes[level, index] = node

    def total(self) -> Vector | None:
        """Return the sum of all chunks or None; call once, when complete. Valid until `open`."""
        # Nodes without a sibling are added from left to right, by the first chunk in each.
        nodes = sorted(self._nodes.items(), key=lambda item: item[0][1] << item[0][0])
        self._nodes.clear()
        total: Vector | None = None
        for _, node in nodes:
            total = node if total is None else self._add(total, node)
        if total is not None:
            self._free.append(total)
        return total

    def _add(self, left: Vector, right: Vector) -> Vector:
        n = self._n_gradient
        torch.from_numpy(left[:n]).add_(torch.from_numpy(right[:n]))
        # Buffers are not summed: the last chunk's stay, as in sequential training.
        left[n:] = right[n:]
        self._free.append(right)
        return left
