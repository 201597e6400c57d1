"""Roles as they are, save for what their work costs, or whether it is timed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

from distbelief.memory import Memory
from distbelief.roles import Action, Address, Compute, Event, Role, Seconds
from distbelief.simulation.world import Builder


Adapt = Callable[[str, Compute], Compute]
"""Given the kind of a role and what it asks for; returns what is done instead."""

Handled = Callable[[str, Event, Callable[[], Sequence[Action]]], Sequence[Action]]
"""Given the kind of a role, an event and how it handles that; returns what it asks."""


def _plainly(kind: str, event: Event, handle: Callable[[], Sequence[Action]]) -> Sequence[Action]:
    del kind, event
    return handle()


@final
@dataclass(slots=True, kw_only=True)
class AdaptedRole:
    """A role whose work is looked at before it is done."""

    kind: str
    role: Role
    adapt: Adapt
    handled: Handled = _plainly

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        handle = partial(self.role.handle, event, now)
        actions = self.handled(self.kind, event, handle)
        if not any(isinstance(action, Compute) for action in actions):
            return actions
        return [
            self.adapt(self.kind, action) if isinstance(action, Compute) else action
            for action in actions
        ]

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it is doing."""
        return self.role.status()


def adapted(
    builders: Mapping[Address, Builder],
    kinds: Mapping[Address, str],
    *,
    adapt: Adapt,
    handled: Handled = _plainly,
) -> dict[Address, Builder]:
    """Return builders of adapted roles; the supervisor, who computes nothing, stays."""

    def build_with(name: Address, build: Builder) -> Builder:
        def build_it(memory: Memory) -> Role:
            return AdaptedRole(kind=kinds[name], role=build(memory), adapt=adapt, handled=handled)

        return build_it

    return {
        name: build if kinds[name] == "supervisor" else build_with(name, build)
        for name, build in builders.items()
    }
