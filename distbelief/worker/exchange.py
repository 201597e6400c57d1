"""When a worker fetches and pushes, what it has learned and not pushed, and how a fetch keeps that.

    send = "gradient"   step      u := u + g;  x := x - rate g      the sum of raw gradients (DB-7)
                        push      u, then u := 0
                        install   x := w - rate u                   or w, if local steps may go
    send = "delta"      step      x := optimizer(x, g)
                        push      a - x, then a := x                a: what the shards know of it
                        install   x := w + (x - a), a := w

So each step is in exactly one push, and no fetch loses or repeats one. Applied at rate 1.0 by rule
"sgd", a shard moves by a - x as x did. Nothing here knows a client or a message. What works on
tensors may run in the compute executor, one after the other; what counts is for the owner's thread.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, final

import torch

from distbelief.core.errors import JobError
from distbelief.parameter_server.layout import PartialView
from distbelief.worker.inner_optimizer import InnerOptimizer


# --- when ---

# Of every = "auto": steps between exchanges, in powers of two, so that a push and a fetch take at
# most this share of the time that the steps take.
EVERY_MIN: Final = 4
EVERY_MAX: Final = 1024
LINK_SHARE: Final = 0.8


def fitting_every(exchange_seconds: float, step_seconds: float) -> int:
    """Return the steps between exchanges for a link and a model that take so long."""
    every = EVERY_MIN
    while every < EVERY_MAX and exchange_seconds > LINK_SHARE * every * step_seconds:
        every *= 2
    return every


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When a worker fetches and pushes.

    step                 0        1        2        3        ...    n_fetch = n_push = 2
    fetch                x                 x                        DB-6
    push                 x                 x                        DB-6
    gradients pushed     g0                g1 + g2                  DB-7: raw, summed
    local step                             (x)      x               DB-9

    fetch                x                 (x)      (x)             deltas: once the push is applied
    push                          x                 x
    """

    n_fetch: int = 1  # steps between fetches of gradients
    n_push: int = 1  # steps between pushes
    blocking: bool = False  # fetch only once every push is applied; no step before that fetch
    overwrite_local_steps: bool = False  # a fetch overwrites local steps that are not pushed yet
    sends_delta: bool = False
    # A push is the mean of n_push gradients of one version of the parameters, and a fetch follows.
    means: bool = False
    norm_max: float | None = None  # bound of the 2-norm of such a mean; None: no bound

    # Whether a bad gradient could spoil a sum, or the local copy of the parameters.
    sums_gradients: bool = field(init=False)
    keeps_local_steps: bool = field(init=False)  # over a fetch
    # Whether a fetch waits for every push: with one in flight it is unknown whether the fetched
    # parameters contain it, and so whether its local steps must be repeated (DB-11).
    awaits_pushes: bool = field(init=False)

    def __post_init__(self) -> None:
        sums = self.n_fetch > 1 or self.n_push > 1 or self.sends_delta
        # With n_fetch = n_push = 1 there is no local step to keep.
        keeps = sums and not self.overwrite_local_steps
        object.__setattr__(self, "sums_gradients", sums)
        object.__setattr__(self, "keeps_local_steps", keeps)
        object.__setattr__(self, "awaits_pushes", self.blocking or keeps)

    def fetches_before(self, step: int) -> bool:
        """Return whether a worker that sends gradients fetches."""
        return step % self.n_fetch == 0

    def pushes_after(self, step: int, *, n_unsent: int = 1) -> bool:
        """Return whether to push now, with so many gradients or local steps to send."""
        if self.sends_delta or self.means:
            return n_unsent >= self.n_push
        return n_unsent > 0 and step % self.n_push == 0

    def may_fetch(self, *, unacknowledged: int, during: int, pushes: bool | None = None) -> bool:
        """Return whether a fetch may begin during the computation of a step.

        `pushes`: whether a push follows that step, where its number does not tell.
        """
        if unacknowledged and self.awaits_pushes:
            return False
        # A push of local steps waits for a fetch that has begun.
        if self.sends_delta:
            return True
        pushes = self.pushes_after(during) if pushes is None else pushes
        return not (self.blocking or (self.keeps_local_steps and pushes))


# --- parameters ---


def is_finite(tensors: Mapping[int, torch.Tensor]) -> bool:
    # One pass over the sums; checking each element takes forty times as long.
    sums = [tensor.sum() for tensor in tensors.values()]
    return not sums or bool(torch.stack(sums).sum().isfinite())


@final
class GradientSum:
    """Gradients summed until they are pushed."""

    def __init__(
        self,
        n_items: int,
        *,
        shares_memory: bool = True,  # two gradients of a step may lie in the same memory
        copies: bool = False,  # the memory of gradients belongs to somebody else
    ) -> None:
        # One per item; None without a gradient.
        self.sums: list[torch.Tensor | None] = [None] * n_items
        self._shares_memory, self._copies = shares_memory, copies
        self._owned: set[int] = set()  # sums whose memory is not shared

    def add(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Add the gradients of a step, and take their memory unless they are to be copied."""
        for item, gradient in gradients.items():
            total = self.sums[item]
            if total is None:
                self.sums[item] = gradient.clone() if self._copies else gradient
            elif item in self._owned or self._copies or not self._shares_memory:
                total.add_(gradient)
            else:
                # The first one may share memory with another gradient, so copy once.
                self.sums[item] = total + gradient
                self._owned.add(item)

    def changes(self) -> Iterable[tuple[int, torch.Tensor]]:
        return [(item, total) for item, total in enumerate(self.sums) if total is not None]

    @property
    def is_finite(self) -> bool:
        return is_finite(dict(self.changes()))

    def drop(self) -> None:
        self.sums[:] = [None] * len(self.sums)
        self._owned.clear()


@final
class LocalSteps:
    """How far values have come since the last push, by an optimizer of their own.

    The state of the optimizer (velocity, moments) stays here; it is lost when steps are taken back.
    """

    def __init__(
        self,
        values: Sequence[torch.Tensor],  # flat
        items: Sequence[int],  # those of them that are trained
        inner: InnerOptimizer | None = None,  # None: steps are taken elsewhere
    ) -> None:
        self._values = values
        self._inner = inner
        self._anchors = {item: values[item].clone() for item in items}
        self._is_held = False  # the anchors hold x - a, while an install overwrites x
        self._has_moved = False  # x differs from a

    @property
    def is_held(self) -> bool:
        return self._is_held

    @property
    def items(self) -> set[int]:
        return set(self._anchors)

    def changes(self) -> Iterable[tuple[int, torch.Tensor]]:
        """Yield a - x of one item after the other: together they take as much memory as x."""
        for item, anchor in self._anchors.items():
            yield item, -anchor if self._is_held else anchor - self._values[item]

    def restart(self) -> None:
        """Drop all steps that are not pushed, and the optimizer's state; a fetch follows."""
        self._is_held = self._has_moved = False
        if self._inner is not None:
            self._inner.forget()

    def step(self, gradients: Mapping[int, torch.Tensor], number: int) -> None:
        """Take a step; `number` is that of the replica's whole training, for the schedule."""
        if self._inner is not None:
            self._inner.step(gradients, number)
        self._has_moved = True

    def pushed(self, *, finite: bool) -> None:
        """All steps so far are pushed; or refused, and then they are taken back."""
        self._has_moved = False
        if not finite and self._inner is not None:
            self._inner.forget()
        if self._is_held:  # what is installed next becomes the anchor
            return
        values, anchors = self._trained, list(self._anchors.values())
        if not values:  # of a rank that trains nothing
            return
        if finite:
            torch._foreach_copy_(anchors, values)
        else:
            torch._foreach_copy_(values, anchors)

    def hold(self) -> None:
        """Before an install, which may be repeated: keep what is not pushed."""
        if self._is_held:
            return
        self._is_held = True
        if self._has_moved:
            for item, anchor in self._anchors.items():
                torch.sub(self._values[item], anchor, out=anchor)

    def merge(self) -> None:
        """After an install: what is here now is the anchor; repeat what is not pushed from it."""
        self._is_held = False
        for item, anchor in self._anchors.items():
            value = self._values[item]
            # Without steps the fetched values stay as they are, to the sign of a zero.
            moved = value + anchor if self._has_moved else None
            anchor.copy_(value)
            if moved is not None:
                value.copy_(moved)

    def merge_from(self, fetched: list[torch.Tensor]) -> None:
        """The same for values that lie beside these; the former anchors take their places."""
        if not self._anchors:
            return
        torch._foreach_sub_(self._trained, list(self._anchors.values()))
        torch._foreach_add_(self._trained, [fetched[item] for item in self._anchors])
        for item, anchor in self._anchors.items():
            self._anchors[item], fetched[item] = fetched[item], anchor

    def where_changed(self) -> list[int]:
        """Return the items whose values are not the anchor's."""
        pairs = self._anchors.items()
        return [item for item, anchor in pairs if not torch.equal(self._values[item], anchor)]

    @property
    def _trained(self) -> list[torch.Tensor]:
        return [self._values[item] for item in self._anchors]


# --- buffers ---
#
#     sent     as the shards know it from this worker: fetched, or pushed
#     push     a buffer: its value        a counter: value - sent
#     fetch    value := fetched + (value - sent)     if it contains all pushes of this worker
#              value stays                           if some are still under way
#
# In the second case it is not known which of them the fetched values contain. So a worker that
# waits for no push has statistics of its own after its first fetch, and the shards have the mean of
# all workers'.


@final
class LocalBuffers:
    """Buffers among a worker's tensors: what its steps change outlives fetches, and is pushed once.

    Used where those change: no install or step runs.
    """

    def __init__(self, view: PartialView, values: Sequence[torch.Tensor]) -> None:
        self._values = values
        kinds = {item: spec.kind for item, spec in enumerate(view.tensors)}
        self.all = [item for item, kind in kinds.items() if kind != "parameter"]
        self._counters = [item for item, kind in kinds.items() if kind == "counter"]
        # Frozen parameters come once, and are not pushed.
        self._items = [item for item in self.all if view.tensors[item].name not in view.frozen]
        self._sent: dict[int, torch.Tensor] = {}
        self._held: dict[int, torch.Tensor] | None = None  # while an install overwrites them

    def forget(self) -> None:
        """Let the next fetch overwrite everything."""
        self._sent.clear()
        self._held = None

    def hold(self) -> None:
        """Before an install, which may be repeated: keep the values."""
        if self._held is None:
            self._held = {item: self._values[item].clone() for item in self._sent}

    def merge(self, *, contains_pushes: bool) -> None:
        """After an install."""
        held, self._held = self._held or {}, None
        for item in self._items:
            value, own = self._values[item], held.get(item)
            # What is not finite comes from a skipped sample.
            if own is None or not bool(own.isfinite().all()):
                self._sent[item] = value.clone()
                continue
            sent = self._sent[item]
            if not contains_pushes or torch.equal(value, sent):
                value.copy_(own)  # to the bit
                continue
            self._sent[item] = value.clone()
            if not torch.equal(own, sent):
                value += own - sent

    def to_push(self, after: Mapping[int, torch.Tensor] | None = None) -> dict[int, torch.Tensor]:
        """Return what is pushed of each, if the values become `after`."""
        after = after or {}
        pushed = {item: after.get(item, self._values[item]) for item in self.all}
        return pushed | {item: pushed[item] - self._sent[item] for item in self._counters}

    def pushed(self) -> None:
        """What is here now was pushed."""
        for item in self._sent:
            self._sent[item].copy_(self._values[item])


Bindings = Sequence[tuple[torch.nn.Module, str, torch.Tensor]]
"""Buffers of a module: owner, name there, and the tensor that is to stay bound to it."""


def bindings_of(module: torch.nn.Module) -> Bindings:
    return [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]


def bind_again(bindings: Bindings) -> None:
    """Copy the values of buffers that forward has bound to new tensors into the old ones."""
    for owner, name, tensor in bindings:
        bound = owner._buffers[name]  # noqa: SLF001
        if bound is not tensor and bound is not None:
            if bound.shape != tensor.shape:
                raise JobError(
                    f"buffer {name!r} of a {type(owner).__name__} has become {list(bound.shape)}, "
                    f"and was {list(tensor.shape)} at first: register it with persistent=False, so "
                    "that each process keeps its own"
                )
            tensor.copy_(bound)
            owner._buffers[name] = tensor  # noqa: SLF001


# --- all of it ---


class Draft(Protocol):
    """A push that is filled tensor by tensor."""

    def put(self, index: int, tensor: torch.Tensor) -> None: ...

    def put_each(self, tensors: Mapping[int, torch.Tensor]) -> None: ...


Rates = float | Sequence[float]
"""Of a worker's own steps with gradients: one rate, or one per item."""


@final
class ExchangeState:
    """What one worker, or one rank of it, has to push, and when it exchanges.

        add, count   ...   put_into, staged, sent   ...   hold, install, merge, fetched

    `add`, `put_into`, `staged`, `hold` and `merge` work on the tensors; the others count.
    """

    def __init__(  # noqa: PLR0913 -- one call describes one worker's exchange
        self,
        values: Sequence[torch.Tensor],  # flat; parameters and buffers
        view: PartialView,  # of the same tensors
        pace: Pace,
        *,
        trained: Sequence[int],  # items
        inner: InnerOptimizer | None = None,  # of deltas
        shares_memory: bool = True,  # of gradients, as in `GradientSum`
        copies: bool = False,
        fits_link: bool = False,  # every = "auto"
        encodes: bool = False,  # pushes: what was put cannot be taken back
    ) -> None:
        self.pace = pace
        self.buffers = LocalBuffers(view, values)
        # Whether a fetch keeps something that is here.
        self.changes_installs = bool(self.buffers.all) or pace.keeps_local_steps
        self.n_unsent = 0  # gradients or local steps that are not pushed
        self.fetch_due = True  # nothing was fetched since the last push
        self.has_values = False  # something was fetched since the last `drop`
        self._values = values
        self._local_steps = LocalSteps(values, trained, inner) if pace.sends_delta else None
        self._sum = GradientSum(len(values), shares_memory=shares_memory, copies=copies)
        self._clocks: tuple[int, ...] = ()  # of the shards, when the oldest of them was computed
        self._fits_link, self.encodes = fits_link, encodes
        self._began: float | None = None  # the last exchange, until it is measured
        self._seconds: float | None = None  # that one takes

    # ------------------------------------------------------------------- counts

    def count(self, clocks: tuple[int, ...]) -> None:
        """A step was added, from parameters of these clocks."""
        if not self.n_unsent:
            self._clocks = clocks
        self.n_unsent += 1

    def fetched_clocks(self, clocks: Sequence[int]) -> tuple[int, ...]:
        """Return the clocks of a push: those of its oldest step give the staleness."""
        if not self.n_unsent:
            return tuple(clocks)
        # A restarted shard counts on from an older clock, so take the smaller one.
        return tuple(map(min, self._clocks, clocks))

    def fetches_before(self, step: int) -> bool:
        by_push = self.pace.sends_delta or self.pace.means
        return self.fetch_due if by_push else self.pace.fetches_before(step)

    def pushes_after(self, step: int) -> bool:
        return self.pace.pushes_after(step, n_unsent=self.n_unsent)

    @property
    def may_go_on(self) -> bool:
        """Whether a step may begin before a fetch that is due has come."""
        if self.pace.blocking or self._local_steps is None:
            return False
        # Where the link is slower than `every` steps, the worker waits for it in the end.
        is_late = self.n_unsent >= 2 * self.pace.n_push
        return self.has_values and not (is_late or self._local_steps.is_held)

    def sent(self, now: float, *, finite: bool = True) -> None:
        """What was staged is pushed, or refused."""
        self.n_unsent = 0
        if finite:
            self.fetch_due, self._began = True, now

    def fetched(self) -> None:
        self.fetch_due, self.has_values = False, True

    def fit_to_link(self, now: float, *, step_seconds: float) -> float | None:
        """Choose the steps between two exchanges, once one is complete.

        Return the seconds of a push and the fetch after it, if that changes the number of steps.
        """
        if not self._fits_link or self.fetch_due or self._began is None:
            return None
        seconds, self._began = now - self._began, None
        # A mean over the last few: links and neighbours change.
        last = seconds if self._seconds is None else self._seconds
        self._seconds = (last + seconds) / 2.0
        every = fitting_every(self._seconds, step_seconds)
        if every == self.pace.n_push:
            return None
        self.pace = replace(self.pace, n_push=every)
        return self._seconds

    def discard(self) -> None:
        """Push nothing of the gradients so far."""
        self._sum.drop()
        self.n_unsent = 0

    def drop(self) -> None:
        """Begin anew with the next fetch, which overwrites everything; no work is running."""
        self.discard()
        self.buffers.forget()
        if self._local_steps is not None:
            self._local_steps.restart()
        self.fetch_due, self.has_values = True, False
        self._began = None

    # ------------------------------------------------------------ work on tensors

    def add(
        self, gradients: Mapping[int, torch.Tensor], *, rates: Rates = 0.0, number: int = 0
    ) -> None:
        """Take the gradients of a step, and a local step at these rates or by the optimizer."""
        if self._local_steps is not None:
            self._local_steps.step(gradients, number)
            return
        self.descend(gradients, rates)
        self._sum.add(gradients)

    def descend(self, gradients: Mapping[int, torch.Tensor], rates: Rates) -> None:
        """Take a local step, which is pushed only if `add` takes the gradients, too."""
        if isinstance(rates, Sequence):
            for item, gradient in gradients.items():
                if rates[item]:
                    self._values[item].add_(gradient, alpha=-rates[item])
        elif gradients and rates:
            values = [self._values[item] for item in gradients]
            torch._foreach_add_(values, list(gradients.values()), alpha=-rates)

    def push_facts(
        self, clocks: Sequence[int], *, trained: Collection[int]
    ) -> tuple[tuple[int, ...], list[torch.Tensor | None] | None]:
        """Return `fetched_clocks`, and what a push touches: None if that is all.

        What got no gradient must not move, by weight decay or momentum, as in torch. A push without
        any is of what a codec has held back, of everything.
        """
        touched = self.touched
        is_all = not self.n_unsent or all(touched[item] is not None for item in trained)
        return self.fetched_clocks(clocks), None if is_all else touched

    @property
    def touched(self) -> list[torch.Tensor | None]:
        """The values that a push changes; None for those without a gradient."""
        steps = self._local_steps
        items = {item for item, _ in self._sum.changes()} if steps is None else steps.items
        items |= {*self.buffers.all}
        return [value if item in items else None for item, value in enumerate(self._values)]

    def put_into(self, draft: Draft, *, is_rest: bool = False) -> None:
        """Put into a draft what a push has; `staged` follows.

        Nothing but buffers if it is of the rest that a codec has held back.
        """
        buffers = self.buffers.to_push()
        if is_rest:
            draft.put_each(buffers)
            return
        if self._local_steps is None and not self.pace.means:
            draft.put_each(dict(self._sum.changes()) | buffers)
            return
        own = self._local_steps.changes() if self._local_steps is not None else self._means()
        for changes in (own, buffers.items()):
            for item, change in changes:  # one difference at a time is in memory
                draft.put(item, change)

    def _means(self) -> Iterable[tuple[int, torch.Tensor]]:
        # Not in place: two sums may share memory, and a push that fails is put once more.
        means = ((item, total / self.n_unsent) for item, total in self._sum.changes())
        if self.pace.norm_max is None:
            return means
        found = dict(means)
        norm = torch.nn.utils.get_total_norm(found.values())
        factor = (self.pace.norm_max / (norm + 1e-6)).clamp(max=1.0)  # of clip_grad_norm_
        return ((item, mean * factor) for item, mean in found.items())

    def staged(self, *, finite: bool = True, is_rest: bool = False) -> None:
        """All that was put is pushed. If it is refused, local steps are taken back."""
        self._sum.drop()
        if self._local_steps is not None and not is_rest:
            self._local_steps.pushed(finite=finite)
        if finite:
            self.buffers.pushed()

    def hold(self) -> None:
        """Before an install, which may be repeated: keep what is not pushed."""
        self.buffers.hold()
        if self._local_steps is not None:
            self._local_steps.hold()

    def merge(self, *, contains_pushes: bool, rates: Rates = 0.0) -> None:
        """After an install: repeat from the fetched values what is not pushed."""
        self.buffers.merge(contains_pushes=contains_pushes)
        if self._local_steps is not None:
            self._local_steps.merge()
        elif self.pace.keeps_local_steps:
            self.descend(dict(self._sum.changes()), rates)

    def merge_from(self, fetched: list[torch.Tensor]) -> None:
        """The same for values of an install that lie beside these, and contain all pushes."""
        assert self._local_steps is not None
        self.buffers.hold()
        for item in self.buffers.all:
            self._values[item].copy_(fetched[item])
        self.buffers.merge(contains_pushes=True)
        self._local_steps.merge_from(fetched)

    def where_changed(self) -> list[int]:
        """Return the items that differ from what the shards know."""
        return [] if self._local_steps is None else self._local_steps.where_changed()
