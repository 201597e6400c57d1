"""What reads the bytes of other machines.

wire    frames of a message     piece   documents in pieces      brief   a run's brief
job     the job in it           plan    the plan in it           place   an endpoint
door    requests of RFC 27      names   who may speak under which name
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Final, cast, get_args

import msgspec
import torch
from torch import nn

from distbelief.cluster.bootstrap import FileDownload, localized, read_job_spec, write_job_spec
from distbelief.config.load import job_from_json, parse_job
from distbelief.errors import LocalProtocolError, RemoteProtocolError
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.losses import append_loss
from distbelief.launch.role_process import RoleSpec
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.program.cluster import Machine, uniform
from distbelief.program.placement import Placement
from distbelief.program.plan import decode, encode, plan_for
from distbelief.protocol import Blob, FileChunk, Message
from distbelief.protocol.codec import Codec, Frame
from distbelief.roles.role import HOST
from distbelief.transport.address import Endpoint
from distbelief.transport.config import KeyConfig
from distbelief.transport.keys import Allowed, KeyFiles, KeyPair
from experiments.fuzz.mutating import numbers
from experiments.fuzz.samples import Sampler
from experiments.fuzz.targets import Decoder, Open, plain


JOB: Final = """
[model]
factory = "nets:make"
arguments = { width = 16 }
[data.train]
factory = "nets:samples"
[algorithm]
name = "downpour"
loss = "cross_entropy"
batch_size = 32
rule = { name = "adagrad", learning_rate = 0.03 }
[cluster]
replicas = 2
shards = 2
[stop]
epochs = 2
[output]
directory = "runs/x"
"""

SANDBLASTER: Final = """
name = "x"
[model]
factory = "nets:make"
[data.train]
factory = "nets:samples"
arguments = { n = 9 }
[data.test]
factory = "nets:samples"
[algorithm]
name = "sandblaster"
loss = "mse"
[cluster]
replicas = 3
shards = 2
[evaluation]
every = "2 s"
[stop]
seconds = "1 h"
[output]
directory = "runs/x"
report_every = "250 ms"
"""

N_SAMPLES: Final = 12  # of each kind of message
_HEAD: Final = struct.Struct("<HB")  # bytes of the header, arrays; both follow
_STEP: Final = struct.Struct("<IIB")  # offset, length of all, bytes that follow


def _wire() -> Decoder:
    wire = Codec(run="run", strangers=HOST)

    def read(data: bytes) -> None:
        n_header, n_arrays = _HEAD.unpack(data[:3].ljust(3, b"\x00"))
        header, array = data[3 : 3 + n_header], data[3 + n_header :]
        frames: list[Frame] = [header, *[array] * (n_arrays % 4)]
        told = wire.decode(frames)
        # What was taken can be said again.
        again = wire.encode(told.message, sender=told.sender, incarnation=told.incarnation)
        wire.decode(again)

    return Decoder(what="messages", seeds=tuple(map(_joined, _messages(wire))), decode=read)


def _messages(wire: Codec) -> Iterator[Sequence[Frame]]:
    """Yield some messages of every kind."""
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


def _piece() -> Decoder:
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
        what="pieces of documents",
        seeds=(words[0] + words[2], b"".join([words[0], words[1], words[3]])),
        decode=read,
        refusals=(RemoteProtocolError,),
    )


def _spec(text: str = JOB) -> RoleSpec:
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


def _brief() -> Decoder:
    content = write_job_spec(_spec(), plan=None)

    def read(data: bytes) -> None:
        brief = read_job_spec(data)
        localized(brief.spec.job, Path("/home/eva"))

    return Decoder(what="a run's brief", seeds=(content,), decode=read)


def _job() -> Decoder:
    contents = [bytes(_spec(text).job) for text in (JOB, SANDBLASTER)]
    return Decoder(what="the job in it", seeds=tuple(contents), decode=job_from_json)


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

    return Decoder(what="the plan in it", seeds=(body,), decode=read)


def _place() -> Decoder:
    words = ("tcp://10.0.0.1:7700", f"tcp://0.0.0.0:1?key={'a' * 64}")

    def read(data: bytes) -> None:
        place = Endpoint.parse(data.decode("utf-8", "surrogateescape"))
        assert Endpoint.parse(str(place)) == place

    return Decoder(what="endpoints", seeds=tuple(map(str.encode, words)), decode=read)


@contextmanager
def _door() -> Iterator[Decoder]:
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
            verdict.reply(request)

        frames = [b"1.0", b"1", b"", b"10.0.0.1", b"", b"CURVE"]
        known = b"\x1e".join([*frames, bytes.fromhex(pair.public)])
        unknown = b"\x1e".join([*frames, bytes(32)])
        yield Decoder(what="requests at the door", seeds=(known, unknown), decode=read)


DECODERS: Final[Mapping[str, Open]] = MappingProxyType(
    {
        "wire": plain(_wire),
        "piece": plain(_piece),
        "brief": plain(_brief),
        "job": plain(_job),
        "plan": plain(_plan),
        "place": plain(_place),
        "door": _door,
    }
)
