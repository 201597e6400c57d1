"""A training loop that sleeps instead of computing, and says when each step ended.

    python -m experiments.benchmarks.bare.paced_loop SETTING RANK

Several hosts share two processors here: only what is sent, and the optimizer of the loop, is real.
Of each step it says the time, and what the interface of its host has received and sent so far.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import distributed, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

import distbelief
from distbelief.core.memory import keep_memory
from distbelief.transport.keys import new_secret
from distbelief.transport.listen_config import ListenConfig
from experiments.benchmarks.measuring.workers import serve
from experiments.benchmarks.network.hosts import INTERFACE
from experiments.speech.model import acoustic_net


SERVER: Final = -1  # rank of the parameter server
_INT4: Final = {"codec": "int4"}
SERVED: Final[
    Mapping[str, Mapping[str, Any]]
] = {  # how a `ParameterServer` tells loops to exchange
    "quorum": {"preset": "decoupled-diloco"},
    "ssp": {"preset": "ssp"},
    "int4": {"preset": "decoupled-diloco", "push": _INT4, "fetch": _INT4},
    "bfloat16": {"push": {"codec": "bfloat16"}, "fetch": "bfloat16"},
    "threshold": {"push": {"codec": "threshold", "tau": 3.3e-3}, "fetch": "changed"},
    "top_k": {"push": {"codec": "top-k", "share": 0.01}, "fetch": "changed"},
}
APART: Final = "blocking_apart"
POWER_SGD: Final = "ddp_power_sgd"
BLOCKING: Final = ("blocking", APART)
_PORT: Final = 29_500
_RATE: Final = 1e-6
_COUNTERS: Final = [
    Path(f"/sys/class/net/{INTERFACE}/statistics/{way}_bytes") for way in ("rx", "tx")
]

Step = Callable[[], object]
Moment = tuple[float, int]  # seconds, bytes of the interface


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    contestant: str
    every: int  # steps between two exchanges
    addresses: list[str]  # of the server, then of each loop
    server: str = ""  # address of the parameter server, or of torchft's lighthouse
    step_seconds: float  # slept
    slower: int = 1  # times as long sleeps the last loop, and takes as many times fewer steps
    stagger_seconds: float = 0.0  # by which each loop begins after the one before
    small: bool = False  # a tiny net

    def net(self) -> nn.Sequential:
        return acoustic_net([64], 64) if self.small else acoustic_net([2560] * 4, 8192)

    def slowness(self, rank: int) -> int:
        return self.slower if rank == len(self.addresses) - 2 else 1


class PacedNet(nn.Module):
    """A net that sleeps, and has gradients that were computed before.

    They change their sign with each step: so of what a codec holds back nothing piles up.
    """

    def __init__(self, net: nn.Module, seconds: float) -> None:
        super().__init__()
        self.net = net
        self._seconds = seconds
        stream = torch.Generator().manual_seed(1)
        gradients = [torch.randn(p.shape, generator=stream) * 1e-3 for p in net.parameters()]
        self._gradients, self._next = gradients, [-one for one in gradients]

    @override
    def forward(self) -> torch.Tensor:
        parameters = self.net.parameters()
        loss: torch.Tensor = _Paced.apply(  # type: ignore[no-untyped-call]
            self._seconds, self._gradients, *parameters
        )
        return loss

    def compute(self) -> None:
        time.sleep(self._seconds)
        self._gradients, self._next = self._next, self._gradients
        for parameter, gradient in zip(self.net.parameters(), self._gradients, strict=True):
            parameter.grad = gradient


class _Paced(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, seconds: float, gradients: list[torch.Tensor], *parameters: torch.Tensor
    ) -> torch.Tensor:
        time.sleep(seconds)
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    @override
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None, *ctx.gradients


@contextmanager
def training(setting: Setting, rank: int) -> Iterator[tuple[Step, Step]]:
    """Join the others; yield what takes a step, and what ends the training."""
    net = PacedNet(setting.net(), setting.step_seconds * setting.slowness(rank))
    sgd = torch.optim.SGD(net.parameters(), lr=_RATE)
    name, compute = setting.contestant, net.compute
    with ExitStack() as stack:
        optimizer: Any = sgd
        if name.startswith("exchange"):
            optimizer = distbelief.Exchange(
                sgd,
                server=setting.server,
                every=setting.every,
                numbers="float32" if name == "exchange_float32" else "bfloat16",
            )
        elif "preset" in SERVED.get(name, {}):
            every = setting.every if name == "int4" else None
            optimizer = distbelief.Exchange(sgd, server=setting.server, every=every)
        elif name in {"downpour", *BLOCKING, *SERVED}:
            optimizer = distbelief.DownpourSGD(
                net.parameters(), server=setting.server, blocking=name in BLOCKING
            )
            if name == APART:  # users have no choice here
                apart = _apart(optimizer._await_pushes, optimizer._begin_fetch)  # noqa: SLF001
                optimizer._begin_fetch = apart  # noqa: SLF001
        elif name == "torchft_diloco":
            stack.enter_context(_diloco(setting, rank, net, sgd))
        elif name != "alone":
            distributed.init_process_group(
                "gloo",
                init_method=f"tcp://{setting.addresses[1]}:{_PORT}",
                rank=rank,
                world_size=len(setting.addresses) - 1,
            )
            if name == "torch_local_sgd":
                # Not above: torch.distributed.optim warns of a part of torch that it uses itself.
                from torch.distributed.algorithms.model_averaging.averagers import (  # noqa: PLC0415
                    PeriodicModelAverager,
                )
                from torch.distributed.optim import PostLocalSGDOptimizer  # noqa: PLC0415

                averager = PeriodicModelAverager(setting.every, warmup_steps=setting.every - 1)
                optimizer = PostLocalSGDOptimizer(sgd, averager)
            else:
                one_bucket = 1000 if name == POWER_SGD else None
                ddp = DistributedDataParallel(net, bucket_cap_mb=one_bucket)
                if name == "ddp_fp16":
                    ddp.register_comm_hook(None, fp16_compress_hook)
                elif name == POWER_SGD:
                    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
                    ddp.register_comm_hook(state, powerSGD_hook)

                def compute() -> None:
                    ddp().backward()

        def step() -> None:
            optimizer.zero_grad()
            compute()
            optimizer.step()

        yield step, getattr(optimizer, "finish", int)


def _apart(await_pushes: Callable[[], None], begin: Callable[[], None]) -> Callable[..., None]:
    """Return what begins a fetch once all shards have applied the push."""

    def begin_fetch(*_: str) -> None:
        await_pushes()
        begin()

    return begin_fetch


@contextmanager
def _diloco(setting: Setting, rank: int, net: nn.Module, inner: torch.optim.SGD) -> Iterator[None]:
    from torchft import Manager, ProcessGroupGloo  # noqa: PLC0415 -- in a Python of its own
    from torchft.local_sgd import DiLoCo  # noqa: PLC0415

    address = setting.addresses[1 + rank]
    wait = timedelta(seconds=120)
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=wait),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=len(setting.addresses) - 1,
        use_async_quorum=False,
        timeout=wait,
        quorum_timeout=wait,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=setting.server,
        replica_id=f"replica{rank}",
        hostname=address,
        init_sync=False,
    )
    outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with DiLoCo(manager, [net], inner, outer, sync_every=setting.every):
        yield
    manager.shutdown(wait=False)


def take(step: Step, n_steps: int, *, pause_seconds: float) -> list[Moment]:
    time.sleep(pause_seconds)
    moments = [_now()]
    for _ in range(n_steps):
        step()
        moments.append(_now())
    return moments


def _now() -> Moment:
    counts = [int(path.read_text()) for path in _COUNTERS if path.exists()]
    return time.monotonic(), sum(counts)


def serve_parameters(setting: Setting) -> None:
    """Say the address of a parameter server at the first of the addresses, until input ends."""
    n_loops = len(setting.addresses) - 1
    told = SERVED.get(setting.contestant, {})
    server = distbelief.ParameterServer(
        setting.net().parameters(),
        rule=None if "preset" in told else distbelief.SGD(learning_rate=1.0 / n_loops),
        shards=4 if setting.contestant in BLOCKING else 2,
        shared_memory=False,
        **told,
    )
    reach = ListenConfig(host=setting.addresses[0], secret=new_secret())
    request = msgspec.structs.replace(server._request, reach=reach)  # noqa: SLF001
    server._request = request  # noqa: SLF001 -- users have `distbelief serve` for it
    with server:
        serve(lambda _: server.address)


def main(given: str, rank: int) -> None:
    setting = msgspec.json.decode(given, type=Setting)
    keep_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if rank == SERVER:
        serve_parameters(setting)
        return
    pause = rank * setting.stagger_seconds
    slowness = setting.slowness(rank)
    with training(setting, rank) as (step, finish):

        def answer(n_steps: int) -> list[Moment]:
            # Those that wait for each other in each step take as many.
            n_own = n_steps if setting.contestant == "ddp" else n_steps // slowness
            moments = take(step, n_own, pause_seconds=pause)
            if setting.slower != 1:  # nobody waits for a loop that has ended
                finish()
            return moments

        serve(answer)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
