"""Every decoder, with legal bytes for it.

Bytes of other machines:

    wire    frames of a message     chunk   files in chunks         spec    a job spec
    job     the job in it           plan    the plan in it          place   an endpoint
    zap     requests of RFC 27      call   for a checkpoint         reply    to one
    words   of a push, by each codec

Files and texts that this user, or this program, wrote on this machine:

    address   of a job            server   of a standing server    allowed  the allow-list
    secret    a key file          facts    of a shard's snapshot   metrics  lines of a run
    status    of a running job    cut      which snapshots are in use
    tensors   a safetensors file
"""

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, cast, get_args

import msgspec
import numpy as np
import torch
from torch import nn

from distbelief.config.load import job_from_json, parse_job
from distbelief.core.errors import DistBeliefError, LocalProtocolError, RemoteProtocolError
from distbelief.core.folders import Folder
from distbelief.core.tensor_files import TensorFile, encoded
from distbelief.core.vectors import Vector
from distbelief.graph.append_loss import append_loss
from distbelief.graph.capture import InputSpec, capture
from distbelief.job.hosts.bootstrap import (
    FileDownload,
    JobAddress,
    localized,
    read_job_spec,
    write_job_spec,
)
from distbelief.job.launch.role_process import RoleSpec
from distbelief.job.run.directory import Status, status_in
from distbelief.job.run.metrics_file import Measurement, measurements_in
from distbelief.job.run.resume import CheckpointSet, checkpoint_set_in
from distbelief.parameter_server.checkpoint import ShardState, restore, take
from distbelief.parameter_server.codecs.dense import Bfloat16, Int4, Int8
from distbelief.parameter_server.codecs.exactness import History, Residual, Words
from distbelief.parameter_server.codecs.factors import Factors, Layer, write
from distbelief.parameter_server.codecs.threshold import Threshold
from distbelief.parameter_server.codecs.top_k import TopK
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.rules import SGD
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.parameter_server.step_counts import StepCounts
from distbelief.plans.cluster import Machine, uniform
from distbelief.plans.placement import Placement
from distbelief.plans.plan import decode, encode, plan_for
from distbelief.protocol import Blob, FileChunk, Message
from distbelief.protocol.codec import Codec, Frame
from distbelief.protocol.role import HOST
from distbelief.serve.address import ServerAddress
from distbelief.transport.address import Endpoint
from distbelief.transport.file_server import FileCall, FileReply
from distbelief.transport.keys import Allowed, KeyFiles, KeyPair, entries_in, pair_in
from distbelief.transport.listen_config import KeyConfig
from experiments.fuzz.inputs import Sampler, numbers


Decode = Callable[[bytes], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    seeds: tuple[bytes, ...]  # legal bytes
    decode: Decode  # reads bytes, or refuses them by one of `refusals`
    refusals: tuple[type[Exception], ...] = (DistBeliefError,)  # exceptions that say so on purpose

    def accepts(self, data: bytes) -> bool:
        """Return whether it accepts these bytes; whatever else it raises is a finding."""
        try:
            self.decode(data)
        except self.refusals:
            return False
        return True


# A decoder may need a file, or the like, for as long as it is tried
Open = Callable[[], AbstractContextManager[Decoder]]
_FOLDER: Final = Path(__file__).parents[1]
JOB: Final = (_FOLDER / "digits" / "digits.toml").read_text()
SANDBLASTER: Final = (_FOLDER / "speech" / "sandblaster.toml").read_text()
N_SAMPLES: Final = 12  # of each kind of message
_HEAD: Final = struct.Struct("<HB")  # bytes of the header, arrays; both follow
_STEP: Final = struct.Struct("<IIB")  # offset, length of all, bytes that follow


def _wire() -> Decoder:
    wire = Codec(run="run", strangers=HOST)

    def read(data: bytes) -> None:
        n_header, n_arrays = _HEAD.unpack(data[:3].ljust(3, b"\x00"))
        header, array = data[3 : 3 + n_header], data[3 + n_header :]
        frames: list[Frame] = [header, *[array] * (n_arrays % 4)]
        found = wire.decode(frames)
        # What was accepted can be encoded again.
        again = wire.encode(found.message, sender=found.sender, incarnation=found.incarnation)
        wire.decode(again)

    return Decoder(seeds=tuple(map(_joined, _messages(wire))), decode=read)


def _messages(wire: Codec) -> Iterator[Sequence[Frame]]:
    sampler = Sampler(numbers(0))
    for kind in get_args(Message):
        for _ in range(N_SAMPLES):
            try:
                message = cast("Message", sampler.of(kind))
                yield wire.encode(message, sender="host-1", incarnation=1)
            except (ValueError, LocalProtocolError):
                continue  # fields that do not go together


def _joined(frames: Sequence[Frame]) -> bytes:
    header, *arrays = map(bytes, frames)
    return _HEAD.pack(len(header), len(arrays)) + header + b"".join(arrays)


def _chunk() -> Decoder:
    def read(data: bytes) -> None:
        reading = FileDownload("d", 0.0)
        at = 0
        while at + _STEP.size <= len(data):
            offset, n_bytes, n = _STEP.unpack_from(data, at)
            at += _STEP.size
            content = Blob(data[at : at + n])
            at += n
            piece = FileChunk(document="d", offset=offset, n_bytes=n_bytes, content=content)
            reading.take(piece, 1.0)
            reading.ask_again(1.0)
            whole = reading.content
            assert whole is None or len(whole) <= len(data)

    steps = [(0, 6, b"abc"), (3, 6, b"de"), (3, 6, b"def"), (5, 6, b"f")]
    words = [_STEP.pack(o, n, len(c)) + c for o, n, c in steps]
    return Decoder(
        seeds=(words[0] + words[2], b"".join([words[0], words[1], words[3]])),
        decode=read,
        refusals=(RemoteProtocolError,),
    )


def _call() -> Decoder:
    kinds = get_args(FileCall.__annotations__["do"])
    calls = [FileCall(do=do, name="shard-0/1.safetensors", n_bytes=7) for do in kinds]
    return Decoder(
        seeds=tuple(map(msgspec.json.encode, calls)),
        decode=partial(msgspec.json.decode, type=FileCall),
        refusals=(msgspec.MsgspecError, UnicodeDecodeError),
    )


def _reply() -> Decoder:
    replies = (FileReply(number=1, names=("1.safetensors",)), FileReply(error="no", n_bytes=3))
    return Decoder(
        seeds=tuple(map(msgspec.json.encode, replies)),
        decode=partial(msgspec.json.decode, type=FileReply),
        refusals=(msgspec.MsgspecError, UnicodeDecodeError),
    )


class _Bytes:
    """A folder of one file."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def size(self, _name: str) -> int:
        return len(self._content)

    def read(self, _name: str, offset: int, buffer: memoryview) -> None:
        part = self._content[offset : offset + len(buffer)]
        if len(part) < len(buffer):
            raise EOFError("the end")
        buffer[:] = part


def _tensors() -> Decoder:
    def read(data: bytes) -> None:
        file = TensorFile(cast("Folder", _Bytes(data)), "x")
        for name in file.entries:
            file.array(name)
            file.array(name, 1, 2)

    arrays: dict[str, Vector] = {
        "values": np.ones(3, np.float32),
        "state.sum": np.ones((2, 2), np.float64),
    }
    contents = [b"".join(encoded(a, {"clock": "3"})) for a in (arrays, {})]
    return Decoder(seeds=tuple(contents), decode=read)


def _job_spec(text: str = JOB) -> RoleSpec:
    job = parse_job(text, path=Path("/home/ada/nets/x.toml"), overrides=())
    tensors = [TensorSpec(name="w", shape=(3, 2), kind="parameter")]
    return RoleSpec(
        job=msgspec.Raw(job.to_json()),
        run="run",
        supervisor="",
        memory="",
        snapshots="",
        layout=Layout.of(tensors, n_shards=2).spec,
        initials={},
        initial_file=None,
    )


def _spec() -> Decoder:
    content = write_job_spec(_job_spec())

    def read(data: bytes) -> None:
        brief = read_job_spec(data)
        localized(brief.spec.job, Path("/home/eva"))

    return Decoder(seeds=(content,), decode=read)


def _plan() -> Decoder:
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 8))
    graph = append_loss(capture(net, [InputSpec(shape=(2, 6, 6))]), "mse")
    machine = Machine(flops=1e11, memory_rate=3e10, bandwidth=1.25e8)
    plan = plan_for(
        graph,
        {
            "0": Placement(cuts=((), (2,), ()), machines=(0, 1)),
            "1": Placement(cuts=((),), machines=(0,)),
            "2": Placement(
                cuts=((32,),), machines=(1, 2), combine=Placement(cuts=((4,),), machines=(2, 3))
            ),
            "loss": Placement(cuts=(), machines=(3,)),
        },
        batch=32,
        loss="mse",
        cluster=uniform("lab", machine, 4, latency=1e-4),
    )
    whole = encode(plan)
    body = whole[whole.index(b'"plan": ') + len(b'"plan": ') : -2]

    def read(data: bytes) -> None:
        digest = hashlib.sha256(data).hexdigest().encode()  # or none would be read
        decode(b'{"sha256": "%s", "plan": %s}' % (digest, data))

    return Decoder(seeds=(body,), decode=read)


@contextmanager
def _zap() -> Iterator[Decoder]:
    """Judge requests, and check under which names keys that are let in may speak."""
    with TemporaryDirectory() as folder:
        files = KeyFiles(Path(folder) / "keys")
        files.make()
        pair = KeyPair.new()
        files.allow(Allowed(key=pair.public, roles=("worker", "host"), name="ada"))
        ring = KeyConfig(directory=str(files.directory), role="job")
        guard = ring.guard(log=lambda _level, _text: None)

        def read(data: bytes) -> None:
            request = data.split(b"\x1e")
            verdict = guard.judge(request)
            assert not verdict.admitted or verdict.user in {pair.public, ring.public}

        frames = [b"1.0", b"1", b"", b"10.0.0.1", b"", b"CURVE"]
        known = b"\x1e".join([*frames, bytes.fromhex(pair.public)])
        unknown = b"\x1e".join([*frames, bytes(32)])
        yield Decoder(seeds=(known, unknown), decode=read)


_PATH: Final = Path("file")
_KEY: Final = "5f" * 32


def _text(read: Callable[[str], object], *words: str) -> Decoder:
    def decode(data: bytes) -> None:
        read(data.decode("utf-8", "surrogateescape"))

    return Decoder(seeds=tuple(map(str.encode, words)), decode=decode)


def _place(text: str) -> None:
    place = Endpoint.parse(text)
    assert Endpoint.parse(str(place)) == place


def _address(text: str) -> None:
    address = JobAddress.parse(text)
    assert JobAddress.parse(str(address)).port == address.port


def _facts() -> Decoder:
    """The words of a snapshot; its arrays are safetensors' to read."""
    tensors = [TensorSpec(name="w", shape=(70, 2), kind="parameter")]
    layout = Layout.of(tensors, n_shards=1)
    config = ShardConfig(index=0, layout=layout, rule=SGD(learning_rate=0.1))
    size = layout.shard_size(0)
    state = ShardState(
        incarnation=2,
        clock=41,
        values=np.zeros(size, np.float32),
        state={},
        clients=(),
        steps=StepCounts(41),
    )
    snapshot = take("00007", state, config=config)
    words = dict(snapshot.facts)
    clients = '{"replica-0":{"incarnation":3,"watermark":20,"applied":20,"samples":640,'
    clients += '"staleness":2}}'

    def read(data: bytes) -> None:
        pairs = [line.partition(b"\x1f") for line in data.split(b"\x1e")]
        facts = {a.decode("utf-8", "replace"): b for a, _, b in pairs}
        texts = {name: text.decode("utf-8", "replace") for name, text in facts.items()}
        other = replace(snapshot, facts=texts)
        restore(other, config=config, incarnation=9)

    def written(facts: Mapping[str, str]) -> bytes:
        lines = [f"{name}\x1f{text}".encode() for name, text in facts.items()]
        return b"\x1e".join(lines)

    seeds = (written(words), written(words | {"clients": clients}))
    return Decoder(seeds=seeds, decode=read)


def _json(kind: type, decode: Decode, end: bytes = b"") -> Decoder:
    """Begin with some that JSON can hold: it knows neither infinity nor NaN."""
    sampler = Sampler(numbers(0))
    found: list[bytes] = []
    while len(found) < N_SAMPLES:
        with suppress(ValueError, msgspec.ValidationError):  # fields that do not go together
            text = msgspec.json.encode(sampler.of(kind))
            msgspec.json.decode(text, type=kind)
            found.append(text + end)
    return Decoder(seeds=tuple(found), decode=decode)


_WORDS_HEAD: Final = struct.Struct("<BH")  # which codec, elements; words follow


def _words() -> Decoder:
    """Decode them by pieces, as a shard does."""
    kinds = (Bfloat16(), Int8(), Int4(), TopK(), TopK(bits=2), Threshold(tau=1.0), Factors())

    def read(data: bytes) -> None:
        index, n_elements = _WORDS_HEAD.unpack(data[: _WORDS_HEAD.size].ljust(3, b"\x00"))
        n_elements %= 1 << 11
        rest = data[_WORDS_HEAD.size :]
        words = np.frombuffer(rest[: len(rest) // 4 * 4], np.uint32)
        add = kinds[index % len(kinds)].decoder(words, n_elements)
        for start in range(0, n_elements, 512):
            stop = min(start + 512, n_elements)
            add(start, stop, np.zeros(stop - start, np.float32))

    def written(index: int, numbers: Residual) -> bytes:
        codec, n_elements = kinds[index], len(numbers)
        out = np.zeros(codec.n_words_max(n_elements), np.uint32)
        cut = codec.choose([numbers], History())
        encoded = codec.encode(numbers, cut, out)
        return _WORDS_HEAD.pack(index, n_elements) + out[: encoded.n_words].tobytes()

    generator = np.random.default_rng(0)
    numbers = generator.standard_normal(100).astype(np.float32)
    huge = np.where(np.arange(100) % 40, numbers, np.float32(1e30))
    seeds = [written(index, one.copy()) for index in range(len(kinds)) for one in (numbers, huge)]
    seeds.append(_WORDS_HEAD.pack(len(kinds) - 1, 400) + _factored(generator).tobytes())
    return Decoder(seeds=tuple(seeds), decode=read, refusals=(RemoteProtocolError,))


def _factored(generator: np.random.Generator) -> Words:
    """Return words of 400 elements, some of which are those of two layers."""
    numbers = generator.standard_normal(400).astype(np.float32)
    layers = [
        Layer(first, n, offset, numbers[:10].reshape(1, 10), numbers[:20].reshape(1, 20))
        for first, n, offset in ((64, 200, 0), (264, 100, 37))
    ]
    out = np.zeros(400, np.uint32)
    return out[: write(numbers, layers, out)]


_ENTRY: Final = f"{_KEY} worker,host lab-3\n# nobody else\n".encode()
_MAKERS: Final[Mapping[str, Callable[[], Decoder]]] = {
    "wire": _wire,
    "chunk": _chunk,
    "spec": _spec,
    "job": lambda: Decoder(
        seeds=tuple(bytes(_job_spec(text).job) for text in (JOB, SANDBLASTER)), decode=job_from_json
    ),
    "plan": _plan,
    "place": lambda: _text(_place, "tcp://10.0.0.1:7700", f"tcp://0.0.0.0:1?key={'a' * 64}"),
    "address": lambda: _text(
        _address, f"tcp://lab-3.example:7700?key={_KEY}", f"tcp://10.0.0.1:7700?secret={_KEY}"
    ),
    "server": lambda: _text(
        ServerAddress.parse,
        f"tcp://10.0.0.1:7700?key={_KEY}&run=abc&shards=2&copies=1",
        f"tcp://127.0.0.1:41000?secret={_KEY}&run=abc&shards=2&copies=2",
        "ipc:///dev/shm/x/.supervisor.1?run=abc&shards=2&memory=%2Fdev%2Fshm%2Fx",
    ),
    "facts": _facts,
    "allowed": lambda: Decoder(seeds=(_ENTRY, _ENTRY * 3), decode=partial(entries_in, path=_PATH)),
    "secret": lambda: Decoder(seeds=(f"{_KEY}\n".encode(),), decode=partial(pair_in, path=_PATH)),
    "metrics": lambda: _json(Measurement, measurements_in, end=b"\n"),
    "status": lambda: _json(Status, partial(status_in, file=_PATH)),
    "cut": lambda: _json(CheckpointSet, partial(checkpoint_set_in, file=_PATH)),
    "call": _call,
    "reply": _reply,
    "tensors": _tensors,
    "words": _words,
}
DECODERS: Final[Mapping[str, Open]] = {
    **{
        name: lambda make=make: nullcontext(make())  # type: ignore[misc]
        for name, make in _MAKERS.items()
    },
    "zap": _zap,
}
