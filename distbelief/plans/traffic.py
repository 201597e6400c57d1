"""All messages of one kind and name, as arrays: a layer may have 20,000 of them.

A message carries the intersection of what one rank owns and another needs. Boxes of owners are
disjoint, and so are those that one rank needs: each index arrives exactly once (DB-1).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Self, final

import numpy as np

from distbelief.graph.region import IntArray, Region, n_elements, overlaps, to_array, to_regions
from distbelief.plans.tasks import Message, MessageKind


_NONE: Final = np.zeros(0, dtype=np.int64)


@final
@dataclass(frozen=True, eq=False)
class Traffic:
    """Messages of one kind and name, sorted by sender, then by receiver."""

    kind: MessageKind
    name: str  # of the layer or tensor
    senders: IntArray  # (n,)
    receivers: IntArray  # (n,)
    n_bytes: IntArray  # (n,), for the whole batch
    first: IntArray  # (n + 1,): index of the first box of each message
    boxes: IntArray  # (n_boxes, n_dims, 2)
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
        """Return the messages that bring every rank what it needs and does not own.

        The regions of owners are disjoint; `n_bytes` is of one index, for the whole batch.
        """
        kind, name = subject
        wanted = [(q, region) for q, regions in needs.items() for region in regions]
        if set(owners).issuperset(wanted):  # as of most layers
            boxes = _NONE.reshape(0, n_dims, 2)
            return cls(kind, name, _NONE, _NONE, _NONE, np.append(_NONE, 0), boxes)
        i, j, boxes = overlaps(
            to_array([region for _, region in owners], n_dims),
            to_array([region for _, region in wanted], n_dims),
        )
        senders = np.array([p for p, _ in owners], dtype=np.int64)[i]
        receivers = np.array([q for q, _ in wanted], dtype=np.int64)[j]
        # Overlaps of a rank with itself need no message.
        order = np.lexsort((receivers, senders))
        order = order[senders[order] != receivers[order]]
        senders, receivers, boxes = senders[order], receivers[order], boxes[order]
        # Boxes of the same sender and receiver are one message.
        news = np.ones(len(order), dtype=np.bool_)
        news[1:] = np.diff(senders).astype(bool) | np.diff(receivers).astype(bool)
        starts = np.flatnonzero(news)
        sizes = n_elements(boxes)
        totals = np.add.reduceat(sizes, starts) if len(starts) else sizes
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
        return len(self.senders)

    def back(self, kind: MessageKind, *, senders: Collection[int]) -> "Traffic":
        """Return the reverse messages of those receivers that are in `senders`."""
        if not len(self):
            return self  # nobody asks for the kind of no message
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
        # Boxes move with their messages: row k of a message is at its old start plus k.
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
        return Message(
            kind=self.kind,
            name=self.name,
            sender=int(self.senders[index]),
            receiver=int(self.receivers[index]),
            regions=to_regions(self.boxes[self.first[index] : self.first[index + 1]]),
            n_bytes=int(self.n_bytes[index]),
        )

    @cached_property  # by rank: the messages that it sends
    def sending(self) -> Mapping[int, range]:
        machines, starts = np.unique(self.senders, return_index=True)
        stops = [*starts[1:].tolist(), len(self)]
        return {
            machine: range(start, stop)
            for machine, start, stop in zip(machines.tolist(), starts.tolist(), stops, strict=True)
        }

    @cached_property  # by rank: the receiver and the bytes of each message that it sends
    def sent(self) -> Mapping[int, list[tuple[int, int]]]:
        messages = list(zip(self.receivers.tolist(), self.n_bytes.tolist(), strict=True))
        return {machine: messages[i.start : i.stop] for machine, i in self.sending.items()}

    @cached_property  # by rank: the messages that it receives, by sender
    def receiving(self) -> Mapping[int, IntArray]:
        order = np.argsort(self.receivers, kind="stable")
        machines, starts = np.unique(self.receivers[order], return_index=True)
        pieces = np.split(order, starts[1:])
        return dict(zip(machines.tolist(), pieces, strict=bool(len(self))))

    @cached_property  # by rank: the bytes of all messages that it receives
    def received_bytes(self) -> Mapping[int, int]:
        return {machine: int(self.n_bytes[i].sum()) for machine, i in self.receiving.items()}
