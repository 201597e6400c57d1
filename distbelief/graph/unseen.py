"""What a forward does that leaves no trace in a graph of its operations.

    random numbers   of Python, NumPy or torch: the trace keeps those that it drew
    modes of torch   autocast, inference_mode; `no_grad` is kept, as `detached` nodes
    tensors assigned `self.mean = 0.9 * self.mean + ...`
    attributes       what the forward notes in its modules

All of it is told by the state before and after, whatever the forward is written like.
"""

import random  # noqa: TID251 -- to see whether a forward has used it
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, final

import numpy as np
import torch
from torch import nn

from distbelief.graph.layer import GraphError


_DEVICES: Final = ("cpu", "cuda")

Generator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator


@final
class UnseenError(Exception):
    """A forward does what tracing cannot see; its module can be kept whole."""


@final
class LostChangeError(Exception):
    """A module that is not looked into changes its tensors, which would be lost."""


@final
class Watch:
    """Looks on while a model is traced.

    Args:
        root: What is traced.
    """

    def __init__(self, root: nn.Module) -> None:
        self._own = [
            (f"{path}.{word}".lstrip("."), value)
            for path, part in root.named_modules()
            for word, value in vars(part).items()
            if isinstance(value, Generator)
        ]
        self._seeds = self._drawn()
        self._torch = torch.get_rng_state()
        self._modes = _modes()

    def check(self, place: Callable[[], str]) -> None:
        """Check that nothing has happened that is not traced.

        Args:
            place: Tells where the forward is by now.

        Raises:
            UnseenError: something has, and a whole module would do it as well.
            GraphError: not even that would.
        """
        self.check_seeds(place)
        if not torch.equal(torch.get_rng_state(), self._torch):
            raise UnseenError(
                "it draws random numbers, or seeds them, at or before"
                f"{place() or ' its end'}: use torch.nn.Dropout for chance"
            )
        for mode, (before, now) in enumerate(zip(self._modes, _modes(), strict=True)):
            if before != now:
                word = "torch.autocast" if mode else "torch.inference_mode"
                raise UnseenError(f"it computes under {word}, which is not split{place()}")

    def check_seeds(self, place: Callable[[], str]) -> None:
        """Check that nothing was drawn but of torch's own generator.

        Raises:
            GraphError: something was.
        """
        drawn = self._drawn()
        for (name, before), (_, now) in zip(self._seeds, drawn, strict=True):
            if before != now:
                raise GraphError(
                    f"the forward draws random numbers of {name} at or before"
                    f"{place() or ' its end'}: the machines of a replica would draw "
                    "others; use torch.nn.Dropout, or torch.rand in a module of its own"
                )

    def _drawn(self) -> list[tuple[str, object]]:
        """Return the states of all generators but torch's own."""
        return [
            ("Python's `random`", random.getstate()),
            ("numpy.random", _plain(np.random.get_state())),  # noqa: NPY002 -- the user's
            *((f"its {name!r}", _state(value)) for name, value in self._own),
        ]


def _modes() -> tuple[bool, ...]:
    return (
        torch.is_inference_mode_enabled(),
        *(torch.is_autocast_enabled(device) for device in _DEVICES),
    )


def _state(generator: Generator) -> object:
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    return _plain(generator.get_state())


def _plain(state: object) -> object:
    assert isinstance(state, tuple)
    return tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in state)


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Put back whatever a forward writes into the attributes of its modules."""
    before = [(part, dict(vars(part)), _tensors(part)) for part in module.modules()]
    try:
        yield
    finally:
        for part, attributes, tensors in before:
            vars(part).clear()
            vars(part).update(attributes)
            _put_back(part, tensors)


@contextmanager
def tensors_kept(module: nn.Module) -> Iterator[None]:
    """Put back the model's own tensors, should a forward assign others.

    Raises:
        GraphError: it has; the step's change would be lost.
    """
    before = [(path, p, _tensors(p)) for path, p in module.named_modules()]
    error: Exception | None = None
    try:
        yield
    except Exception as found:  # noqa: BLE001 -- of what was assigned, perhaps
        error = found
    lost: list[str] = []
    for path, part, tensors in before:
        lost += [
            f"{path}.{word}".lstrip(".")
            for own, now in zip(tensors, _tensors(part), strict=True)
            for word in now.keys() | own.keys()
            if own.get(word) is not now.get(word)
        ]
        _put_back(part, tensors)
    if lost:
        raise GraphError(lost_change(min(lost))) from error
    if error is not None:
        raise error


def lost_change(name: str) -> str:
    """Return what is wrong with a forward that changes a tensor of the model."""
    return (
        f"the forward changes {name!r}, a tensor of the model, in place or by "
        "assigning another: that would be lost; keep such state outside of the model"
    )


Tensors = tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]


def _tensors(part: nn.Module) -> Tensors:
    return dict(part._parameters), dict(part._buffers)  # noqa: SLF001 -- torch has no public way


def _put_back(part: nn.Module, tensors: Tensors) -> None:
    parameters, buffers = tensors
    part._parameters.clear()  # noqa: SLF001
    part._parameters.update(parameters)  # type: ignore[arg-type] # noqa: SLF001 -- what was there
    part._buffers.clear()  # noqa: SLF001
    part._buffers.update(buffers)  # noqa: SLF001
