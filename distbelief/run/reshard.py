"""What S shards saved, written anew as what S' shards would have; places of replicas.

One old and one new shard are in memory at a time, or little more. The snapshots that
are read stay as they are.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import final

from safetensors import SafetensorError, safe_open

from distbelief.core.vectors import Vector
from distbelief.errors import StorageError
from distbelief.parameter_server.checkpoint import (
    Content,
    Read,
    Resharding,
    ShardIdentity,
    ShardState,
    restore,
    take,
)
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.optimizers import StepCounts, UpdateRule
from distbelief.parameter_server.session_state import Session
from distbelief.roles.role import Address, Snapshot
from distbelief.run.checkpoints import CheckpointStore


@final
@dataclass(frozen=True, kw_only=True)
class Resharder:
    """Of the newest snapshots of one run.

    Attributes:
        source: Where they are.
        old: Their layout.
        new: That of the shards to come.
        rule: Whose state is in them.
        incarnation: Above all that they know of; the next life begins with it.
    """

    source: CheckpointStore
    old: Layout
    new: Layout
    rule: UpdateRule
    incarnation: int

    def write(self, target: CheckpointStore, *, label: str, samples: Mapping[str, int]) -> None:
        """Write the new shards' snapshots.

        Args:
            target: Where to.
            label: Of all of them.
            samples: Of each replica to come: where it begins in its data.

        Raises:
            StorageError: a snapshot cannot be read, or is of something else, or there
                is no room for the new ones.
        """
        clients = tuple(self._client(name, n) for name, n in samples.items())
        resharding = Resharding(self.old, self.new)
        checked = [self._check(k) for k in range(self.old.n_shards)]
        clocks = [clock for _, clock, _ in checked]
        steps = [steps for _, _, steps in checked]
        with _reader([label for label, _, _ in checked], self.source) as read:
            for k in range(self.new.n_shards):
                content = resharding.shard(k, rule=self.rule, clocks=clocks, steps=steps, read=read)
                snapshot = self._snapshot(k, content, label=label, clients=clients)
                target.save(_shard(k), snapshot)
                del content, snapshot  # before the next one is made

    def _snapshot(
        self, k: int, content: Content, *, label: str, clients: tuple[Session, ...]
    ) -> Snapshot:
        state = ShardState(
            incarnation=self.incarnation - 1,
            clock=content.clock,
            values=content.values,
            state=content.state,
            clients=clients,
            steps=content.steps,
        )
        identity = ShardIdentity(index=k, layout=self.new, rule=self.rule)
        return take(label, state, identity=identity)

    def _client(self, name: str, samples: int) -> Session:
        """Return a replica that has pushed nothing in its present life."""
        return Session(name=Address(name), incarnation=self.incarnation - 1, samples=samples)

    def _check(self, k: int) -> tuple[str, int, StepCounts]:
        """Return label, clock and steps of shard k's snapshot, if all is right."""
        snapshot = self.source.newest(_shard(k))
        if snapshot is None:
            raise StorageError(f"{self.source.directory} has no whole {_shard(k)}")
        identity = ShardIdentity(index=k, layout=self.old, rule=self.rule)
        state = restore(snapshot, identity=identity, incarnation=self.incarnation)
        return snapshot.label, state.clock, state.steps


@contextmanager
def _reader(labels: list[str], store: CheckpointStore) -> Iterator[Read]:
    """Yield what reads ranges of the snapshots of these labels, one of each shard."""
    paths = [store.path(_shard(k), label) for k, label in enumerate(labels)]
    with ExitStack() as stack:
        try:
            opened = [stack.enter_context(safe_open(path, framework="numpy")) for path in paths]
        except (OSError, SafetensorError) as error:
            raise StorageError(f"snapshots cannot be read again: {error}") from error

        def read(shard_index: int, array: str, start: int, stop: int) -> Vector:
            part: Vector = opened[shard_index].get_slice(array)[start:stop]
            return part

        yield read


def _shard(k: int) -> str:
    return f"shard-{k}"
