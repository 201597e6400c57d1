"""Options of `distbelief serve`, and errors in them."""

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from distbelief.core.errors import JobError
from distbelief.parameter_server.rules import SGD, Adam, Momentum, UpdateRule
from distbelief.serve import options
from distbelief.serve.address import parameter_specs
from distbelief.serve.options import listen_config, model, rule
from distbelief.transport.listen_config import ListenConfig


def make() -> nn.Module:
    return nn.Linear(3, 2)


def make_nothing() -> None:
    pass


def test_the_model_is_drawn_from_the_seed() -> None:
    one, same, other = (model(f"{__name__}:make", seed=n) for n in (1, 1, 2))
    weights = [next(net.parameters()) for net in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    with pytest.raises(JobError, match="make_nothing returned None"):
        model(f"{__name__}:make_nothing", seed=0)


def test_a_rule_has_its_options() -> None:
    made = rule("momentum", 0.1, ["momentum=0.5", "nesterov=true"])
    assert made == Momentum(learning_rate=0.1, momentum=0.5, nesterov=True)
    assert rule(None, None, []) == SGD(learning_rate=0.01)
    outer = Momentum(learning_rate=0.5, momentum=0.9, nesterov=True)
    assert rule(None, 0.5, [], preset="diloco") == outer
    assert rule("sgd", 0.5, [], preset="diloco") == SGD(learning_rate=0.5)
    assert rule("adam", None, [], preset="diloco") == Adam(learning_rate=0.01)  # as --help says
    nadam = msgspec.convert({"name": "NAdam", "lr": 0.5, "eps": 0.1}, UpdateRule)
    assert rule("NAdam", 0.5, ["eps=0.1"]) == nadam
    assert rule("NAdam", None, []).learning_rate == 0.01
    with pytest.raises(JobError, match=r"^--preset = .*dilocco.* is not known"):
        rule(None, None, [], preset="dilocco")
    for name, settings, said in [
        ("king", [], "--rule king: .*It knows sgd, momentum"),
        ("AdaWm", [], "Did you mean 'AdamW'"),
        ("sgd", ["momentum=0.5"], "momentum"),
        ("sgd", ["momentum"], "write KEY=VALUE"),
        ("momentum", ["momentum=7.0"], "momentum is 7"),
    ]:
        with pytest.raises(JobError, match=said):
            rule(name, 0.1, settings)


def test_an_address_is_read() -> None:
    assert listen_config("tcp://localhost:7700", keys=None, insecure=False).port == 7700
    assert listen_config("tcp://127.0.0.1:*", keys=None, insecure=False).port == 0
    assert listen_config(None, keys=None, insecure=False) == ListenConfig()
    assert listen_config(None, keys=Path("k"), insecure=False).is_local
    assert listen_config("tcp://0.0.0.0:1", keys=Path("k"), insecure=False).keys is not None


@pytest.mark.parametrize(
    ("bind", "keys", "insecure", "said"),
    [
        ("0.0.0.0:7700", None, False, "is no address"),
        ("tcp://0.0.0.0", None, False, "is no address"),
        ("tcp://127.0.0.1:65536", None, False, "is no address"),
        ("tcp://::1:7700", None, False, "is no address"),
        ("tcp://no.such.host.invalid:7700", None, False, "has no address"),
        ("tcp://0.0.0.0:7700", None, False, "distbelief keys new"),
        ("tcp://0.0.0.0:7700", Path("k"), True, "leave out one of them"),
    ],
)
def test_an_address_that_makes_no_sense_is_named(
    bind: str, keys: Path | None, *, insecure: bool, said: str
) -> None:
    with pytest.raises(JobError, match=said):
        listen_config(bind, keys=keys, insecure=insecure)


def test_a_name_that_only_this_machine_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian has its machine's name at 127.0.1.1: others waited there in vain."""
    monkeypatch.setattr(options, "number_of", lambda _: "127.0.1.1")
    with pytest.raises(JobError, match=r"head is 127\.0\.1\.1 here, for this host alone"):
        listen_config("tcp://head:7700", keys=Path("k"), insecure=False)
    assert listen_config("tcp://127.0.1.1:7700", keys=None, insecure=False).is_local


@pytest.mark.parametrize(
    ("dtype", "way"),
    [
        (torch.float64, "use net.float()"),
        (torch.complex64, "torch.view_as_real"),
        (torch.int64, r"leave it out \(\[p for p in net.parameters\(\) if p.is_floating_point"),
    ],
)
def test_a_parameter_that_is_not_float32_is_refused_with_a_way_that_works(
    dtype: torch.dtype, way: str
) -> None:
    """`net.float()` changes neither integers nor complex numbers."""
    frozen = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)
    with pytest.raises(JobError, match=f"parameter 1 is {dtype}: .*{way}"):
        parameter_specs([nn.Parameter(torch.ones(2)), frozen])


def test_parameters_in_one_memory_are_refused() -> None:
    """Regression: of weights tied by `.data` a fetch wrote one over the other's step."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight.data = first.weight.data
    with pytest.raises(JobError, match=r"parameter 0 and parameter 2 have the same memory.*\.clon"):
        parameter_specs([*first.parameters(), *second.parameters()])
    with pytest.raises(JobError, match="buffer 0 and parameter 0 have the same memory"):
        parameter_specs([first.weight], buffers=[first.weight.detach()[0]])
    both = torch.ones(2, 4)
    first.weight.data, second.weight.data = both[:, ::2], both[:, 1::2]
    parameter_specs([first.weight, second.weight])
