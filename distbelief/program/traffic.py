"""All messages of one kind and name, as arrays: there may be 20,000 of them.

What a machine needs and somebody else owns is the intersection of two boxes. Owners'
boxes do not overlap, nor do those that one machine needs; so each index that it needs
and does not own comes to it exactly once (DB-1).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self, final

import numpy as np

from distbelief.graph.region import IntArray, Region, n_elements, overlaps, to_array, to_regions
from distbelief.program.instructions import Message, MessageKind


@final
@dataclass(frozen=True, eq=False)
class Traffic:
    """Messages of one kind and name, sorted by sender, then by receiver.

    Attributes:
        kind: Of all of them.
        name: Of the layer, or of the tensor.
        senders: (n,)
        receivers: (n,)
        n_bytes: (n,) for the whole batch.
        first: (n + 1,) where in `boxes` those of each message begin.
        boxes: (n_boxes, n_dims, 2)
    """

    kind: MessageKind
    name: str
    senders: IntArray
    receivers: IntArray
    n_bytes: IntArray
    first: IntArray
    boxes: IntArray
    _returned: "dict[tuple[MessageKind, frozenset[int]], Traffic]" = field(
        init=False, repr=False, default_factory=dict
    )

    @classmethod
    def between(
        cls,
        subject: tuple[MessageKind, str],
        owners: Sequence[tuple[int, Region]],
        needs: Mapping[int, Sequence[Region]],
        *,
        n_bytes: int,
        n_dims: int,
    ) -> Self:
        """Return who sends what, so that everybody has what they need.

        Args:
            subject: Kind and name of the messages.
            owners: Machines and what they have: disjoint.
            needs: Of each machine: disjoint.
            n_bytes: Of one index, for the whole batch.
            n_dims: Of the regions.
        """
        wanted = [(q, region) for q, regions in needs.items() for region in regions]
        i, j, boxes = overlaps(
            to_array([region for _, region in owners], n_dims),
            to_array([region for _, region in wanted], n_dims),
        )
        senders = np.array([p for p, _ in owners], dtype=np.int64)[i]
        receivers = np.array([q for q, _ in wanted], dtype=np.int64)[j]
        order = np.lexsort((receivers, senders))
        order = order[senders[order] != receivers[order]]
        senders, receivers, boxes = senders[order], receivers[order], boxes[order]
        news = np.ones(len(order), dtype=np.bool_)
        news[1:] = np.diff(senders).astype(bool) | np.diff(receivers).astype(bool)
        starts = np.flatnonzero(news)
        sizes = n_elements(boxes)
        totals = np.add.reduceat(sizes, starts) if len(starts) else sizes
        kind, name = subject
        return cls(
            kind=kind,
            name=name,
            senders=senders[starts],
            receivers=receivers[starts],
            n_bytes=totals * n_bytes,
            first=np.append(starts, len(order)),
            boxes=boxes,
        )

    def __len__(self) -> int:
        """How many messages."""
        return len(self.senders)

    def back(self, kind: MessageKind, *, senders: Collection[int]) -> "Traffic":
        """Return the same messages on their way back, of those who have to send one."""
        key = (kind, frozenset(senders))
        if key not in self._returned:
            self._returned[key] = self._back(kind, senders)
        return self._returned[key]

    def _back(self, kind: MessageKind, senders: Collection[int]) -> "Traffic":
        kept = np.isin(self.receivers, np.array(sorted(senders), dtype=np.int64))
        order = np.lexsort((self.senders, self.receivers))
        order = order[kept[order]]
        counts = np.diff(self.first)[order]
        first = np.append(0, np.cumsum(counts))
        rows = np.repeat(self.first[:-1][order] - first[:-1], counts)
        return replace(
            self,
            kind=kind,
            senders=self.receivers[order],
            receivers=self.senders[order],
            n_bytes=self.n_bytes[order],
            first=first,
            boxes=self.boxes[rows + np.arange(len(rows))],
        )

    def message(self, index: int) -> Message:
        """Return one message."""
        return Message(
            kind=self.kind,
            name=self.name,
            sender=int(self.senders[index]),
            receiver=int(self.receivers[index]),
            regions=to_regions(self.boxes[self.first[index] : self.first[index + 1]]),
            n_bytes=int(self.n_bytes[index]),
        )

    def n_bytes_between(self, sender: int, receiver: int) -> int:
        """Return the bytes of the message between these two, who must have one."""
        own = self.sending[sender]
        receivers = self.receivers[own.start : own.stop]
        index = own.start + int(np.searchsorted(receivers, receiver))
        assert self.receivers[index] == receiver, (self.name, sender, receiver)
        return int(self.n_bytes[index])

    @cached_property
    def sending(self) -> Mapping[int, range]:
        """Per machine, the messages that it sends."""
        machines, starts = np.unique(self.senders, return_index=True)
        stops = [*starts[1:].tolist(), len(self)]
        return {
            machine: range(start, stop)
            for machine, start, stop in zip(machines.tolist(), starts.tolist(), stops, strict=True)
        }

    @cached_property
    def receiving(self) -> Mapping[int, IntArray]:
        """Per machine, the messages that it receives, by sender."""
        order = np.argsort(self.receivers, kind="stable")
        machines, starts = np.unique(self.receivers[order], return_index=True)
        pieces = np.split(order, starts[1:])
        return dict(zip(machines.tolist(), pieces, strict=bool(len(self))))
