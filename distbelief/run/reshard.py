"""Rewrites the checkpoints of S shards as those of S' shards.

Little more than one old and one new shard is in memory at a time. The old checkpoints are
unchanged.
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
    """Reshards the newest checkpoints of one run."""

    source: CheckpointStore  # the old checkpoints
    old: Layout  # their layout
    new: Layout  # layout of the new shards
    rule: UpdateRule  # update rule whose state they contain
    incarnation: int  # above all in them; the new roles begin with it

    def write(self, target: CheckpointStore, *, label: str, samples: Mapping[str, int]) -> None:
        """Write the new shards' checkpoints, with the data position of each new client.

        Raises:
            StorageError: a checkpoint cannot be read, or does not fit, or the disk is full.
        """
        last = self.incarnation - 1
        clients = tuple(
            Session(name=Address(name), incarnation=last, samples=n) for name, n in samples.items()
        )
        resharding = Resharding(self.old, self.new)
        checked = [self._check(k) for k in range(self.old.n_shards)]
        clocks = [clock for _, clock, _ in checked]
        steps = [steps for _, _, steps in checked]
        with _reader([label for label, _, _ in checked], self.source) as read:
            for k in range(self.new.n_shards):
                content = resharding.shard(k, rule=self.rule, clocks=clocks, steps=steps, read=read)
                snapshot = self._snapshot(k, content, label=label, clients=clients)
                target.save(_shard(k), snapshot)
                del content, snapshot  # free them before the next one is made

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

    def _check(self, k: int) -> tuple[str, int, StepCounts]:
        snapshot = self.source.newest(_shard(k))
        if snapshot is None:
            raise StorageError(f"{self.source.directory} has no intact {_shard(k)}")
        identity = ShardIdentity(index=k, layout=self.old, rule=self.rule)
        state = restore(snapshot, identity=identity, incarnation=self.incarnation)
        return snapshot.label, state.clock, state.steps


@contextmanager
def _reader(labels: list[str], store: CheckpointStore) -> Iterator[Read]:
    paths = [store.path(_shard(k), label) for k, label in enumerate(labels)]
    with ExitStack() as stack:
        try:
            opened = [stack.enter_context(safe_open(path, framework="numpy")) for path in paths]
        except (OSError, SafetensorError) as error:
            raise StorageError(f"checkpoints cannot be read again: {error}") from error

        def read(shard_index: int, array: str, start: int, stop: int) -> Vector:
            part: Vector = opened[shard_index].get_slice(array)[start:stop]
            return part

        yield read


def _shard(k: int) -> str:
    return f"shard-{k}"
