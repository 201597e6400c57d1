"""What reads what this user, or this program, wrote on this machine.

address   of a job            server   of a standing server    allowed  the allow-list
secret    a key file          facts    of a shard's snapshot   metrics  lines of a run
status    of a running job    cut      which snapshots are in use
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np

from distbelief.cluster.address import JobAddress
from distbelief.parameter_server.checkpoint import ShardIdentity, ShardState, restore, take
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.optimizers import SGD, StepCounts
from distbelief.run.directory import RunDirectory, Status, status_in
from distbelief.run.metrics_file import Measurement, measurements_in
from distbelief.run.resume import CheckpointSet, checkpoint_set_in
from distbelief.serve.address import ServerAddress
from distbelief.transport.keys import entries_in, pair_in
from experiments.fuzz.mutating import numbers
from experiments.fuzz.samples import Sampler
from experiments.fuzz.targets import Decoder, Open, plain


N_SAMPLES: Final = 8
_PATH: Final = Path("file")
_KEY: Final = "5f" * 32


def _text(what: str, read: Callable[[str], object], *words: str) -> Decoder:
    def decode(data: bytes) -> None:
        read(data.decode("utf-8", "surrogateescape"))

    return Decoder(what=what, seeds=tuple(map(str.encode, words)), decode=decode)


def _address() -> Decoder:
    def read(text: str) -> None:
        address = JobAddress.parse(text)
        assert JobAddress.parse(str(address)).port == address.port

    secret = f"tcp://10.0.0.1:7700?secret={_KEY}"
    with_key = f"tcp://lab-3.example:7700?key={_KEY}"
    return _text("a job's address", read, with_key, secret)


def _server() -> Decoder:
    return _text(
        "a server's address",
        ServerAddress.parse,
        f"tcp://10.0.0.1:7700?key={_KEY}&run=abc&shards=2&copies=1",
        f"tcp://127.0.0.1:41000?secret={_KEY}&run=abc&shards=2&copies=2",
        "ipc:///dev/shm/x/.supervisor.1?run=abc&shards=2&memory=%2Fdev%2Fshm%2Fx",
    )


def _facts() -> Decoder:
    """The words of a snapshot; its arrays are safetensors' to read."""
    tensors = [TensorSpec(name="w", shape=(70, 2), kind="parameter")]
    layout = Layout.of(tensors, n_shards=1)
    identity = ShardIdentity(index=0, layout=layout, rule=SGD(learning_rate=0.1))
    size = layout.shard_size(0)
    state = ShardState(
        incarnation=2,
        clock=41,
        values=np.zeros(size, np.float32),
        state={},
        clients=(),
        steps=StepCounts(41),
    )
    snapshot = take("00007", state, identity=identity)
    words = dict(snapshot.facts)
    clients = '{"replica-0":{"incarnation":3,"watermark":20,"applied":20,"samples":640,'
    clients += '"staleness":2}}'

    def read(data: bytes) -> None:
        pairs = [line.partition(b"\x1f") for line in data.split(b"\x1e")]
        facts = {a.decode("utf-8", "replace"): b for a, _, b in pairs}
        told = {name: text.decode("utf-8", "replace") for name, text in facts.items()}
        other = replace(snapshot, facts=told)
        restore(other, identity=identity, incarnation=9)

    def written(facts: Mapping[str, str]) -> bytes:
        lines = [f"{name}\x1f{text}".encode() for name, text in facts.items()]
        return b"\x1e".join(lines)

    seeds = (written(words), written(words | {"clients": clients}))
    return Decoder(what="words of a snapshot", seeds=seeds, decode=read)


def _json(*values: object) -> tuple[bytes, ...]:
    return tuple(map(msgspec.json.encode, values))


def _allowed() -> Decoder:
    entry = f"{_KEY} worker,host lab-3\n# nobody else\n".encode()
    return Decoder(
        what="an allow-list", seeds=(entry, entry * 3), decode=partial(entries_in, path=_PATH)
    )


def _secret() -> Decoder:
    seed = f"{_KEY}\n".encode()
    return Decoder(what="a key file", seeds=(seed,), decode=partial(pair_in, path=_PATH))


def _metrics() -> Decoder:
    lines = tuple(line + b"\n" for line in _json(*_samples_of(Measurement)))
    return Decoder(what="lines of metrics.jsonl", seeds=lines, decode=measurements_in)


def _status() -> Decoder:
    return Decoder(
        what="status.json", seeds=_json(*_samples_of(Status)), decode=partial(status_in, file=_PATH)
    )


def _cut() -> Decoder:
    run = RunDirectory(Path("run"), lock=None)
    return Decoder(
        what="cut.json",
        seeds=_json(*_samples_of(CheckpointSet)),
        decode=partial(checkpoint_set_in, file=_PATH, run=run),
    )


def _samples_of(kind: type) -> list[object]:
    """Return some that JSON can say: it knows neither infinity nor NaN."""
    sampler = Sampler(numbers(0))
    found: list[object] = []
    while len(found) < N_SAMPLES:
        value = sampler.of(kind)
        with suppress(msgspec.ValidationError):
            msgspec.json.decode(msgspec.json.encode(value), type=kind)
            found.append(value)
    return found


DECODERS: Final[Mapping[str, Open]] = MappingProxyType(
    {
        "address": plain(_address),
        "server": plain(_server),
        "facts": plain(_facts),
        "allowed": plain(_allowed),
        "secret": plain(_secret),
        "metrics": plain(_metrics),
        "status": plain(_status),
        "cut": plain(_cut),
    }
)
