"""What `--verify` compares, and how; with processes: `tests/processes/test_verify`."""

import os
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from typing_extensions import override

import distbelief
from distbelief.core.errors import JobError
from distbelief.graph.append_loss import append_loss
from distbelief.graph.capture import InputSpec, capture
from distbelief.job import verify
from distbelief.job.launch.local import LocalLauncher
from distbelief.job.verify import Link, VerificationResult
from distbelief.task.losses import loss_function
from distbelief.worker.computation import Computation
from distbelief.worker.proof import Agreement, Results, compared, in_precision, reference
from tests.distbelief.examples import a_sample


GOOD = {"outputs": Agreement(plan=2e-6, one_process=1e-6)}
BAD = {"0.weight": Agreement(plan=4e-6, one_process=1e-6)}
LINK = Link(sender=0, receiver=1, predicted_bytes=10, sent_bytes=10)


def verified(errors: dict[str, Agreement], *links: Link, machines: int = 2) -> VerificationResult:
    return VerificationResult(
        machines=machines,
        cores=2,
        errors=errors,
        links=list(links),
        predicted_seconds=0.5,
        measured_seconds=1.0,
        one_process_seconds=1.5,
        cluster="rack-1g",
    )


def text_of(found: VerificationResult) -> str:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        found.show(console)
    return capture.get()


def test_three_times_the_rounding_of_one_process_agrees() -> None:
    assert verified(GOOD | {"tiny": Agreement(plan=9e-7, one_process=0.0)}).passed
    assert not verified(GOOD | BAD).passed


def test_what_differs_in_float32_agrees_if_it_does_in_float64() -> None:
    """Gradients jump where rounding puts a number on the other side of a kink: ResNeXt-50."""
    right, wrong = (Agreement(plan=2e-2, one_process=1e-3, double=x) for x in (4e-13, 3e-3))
    assert verified(GOOD | {"0.weight": right}).passed
    assert not verified(GOOD | {"0.weight": wrong}).passed
    assert "agrees in float64: 4e-13" in text_of(verified(GOOD | {"0.weight": right}))


def test_bytes_have_to_be_exact() -> None:
    assert verified(GOOD, LINK).passed
    other = Link(sender=1, receiver=0, predicted_bytes=10, sent_bytes=9)
    assert not verified(GOOD, LINK, other).passed


def test_what_is_wrong_is_shown() -> None:
    said = text_of(verified(GOOD | BAD, machines=4))
    assert "differs" in said
    assert "The plan is NOT right here." in said
    assert "4 machines share 2 cores here" in said
    assert "1.50x" in said
    assert "2.00 times that" in said


def test_all_of_it_is_plain_data() -> None:
    plain = verified(GOOD, LINK).plain()
    assert plain["passed"] is True
    assert plain["errors"] == {"outputs": {"plan": 2e-6, "one_process": 1e-6}}
    assert plain["links"] == [{"from": 0, "to": 1, "predicted_bytes": 10, "sent_bytes": 10}]


def test_a_gradient_of_rounding_is_relative_to_the_others() -> None:
    outputs = {
        "outputs": torch.ones(2, dtype=torch.float64),
        "loss": torch.ones((), dtype=torch.float64),
    }
    bias = torch.full((3,), 1e-17, dtype=torch.float64)
    exact = Results(outputs, {"bias": bias, "weight": torch.ones(3, dtype=torch.float64)})
    rounded = {name: tensor.float() for name, tensor in exact.gradients.items()}
    found = Results(outputs, rounded | {"bias": torch.full((3,), 5e-8)})
    errors = compared(found, Results(outputs, rounded), exact)
    assert verified(errors).passed
    assert list(errors)[-1] == "bias"
    assert errors["bias"].plan == pytest.approx(5e-7)


def test_a_plan_without_a_loss_cannot_be_compared() -> None:
    result = distbelief.plan(net(), torch.zeros(8, 4), machines=(2,))
    with pytest.raises(JobError, match="needs a loss: name it"):
        verify.verify(result, factory="", loss="", n_cores=2, launcher=LocalLauncher())


def test_indices_are_drawn_from_the_rows_of_every_table() -> None:
    """All indices once were 0, so that a split embedding was hardly tested."""
    known = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3))
    hidden = nn.Sequential(nn.Embedding(7, 4, scale_grad_by_freq=True), nn.Flatten())
    for module, words in ((known, set(range(7))), (hidden, {0})):
        graph = append_loss(capture(module, [InputSpec(shape=(3,), n_values=7)]), "cross_entropy")
        sample = a_sample((3,), words=True, labels=True)
        inputs, labels = verify._batch(graph, sample, batch=64, loss="cross_entropy")
        assert isinstance(inputs, torch.Tensor)
        assert isinstance(labels, torch.Tensor)
        assert set(inputs.flatten().tolist()) == words
        assert inputs.dtype == labels.dtype == torch.int64


class Starting(nn.Module):
    """From a state of zeros, as a cell of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(torch.zeros(len(x), 4)) * x[:, :3]
        return result


def test_what_a_forward_makes_has_the_precision_of_its_parameters() -> None:
    """Such models could not be compared with float64."""
    module = Starting().double()
    graph = append_loss(capture(module, [InputSpec(shape=(4,))]), "cross_entropy")
    batch = verify._batch(graph, a_sample((4,), labels=True), batch=5, loss="cross_entropy")
    batch = in_precision(batch, torch.float64)
    function = loss_function("cross_entropy")
    found = reference(module, batch, function, graph=graph, seed=0)
    assert found.gradients["layer.bias"].dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


def test_sums_of_nothing_are_zero() -> None:
    nothing = Results({"outputs": torch.zeros(0)}, {})
    assert compared(nothing, nothing, nothing)["outputs"].plan == 0.0


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def test_sigterm_leaves_no_folder_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM once left the folder with all weights in /tmp."""
    result = distbelief.plan(net(), torch.zeros(8, 4), loss="cross_entropy", machines=(2,))
    folders: list[Path] = []

    def end(_: object, computation: Computation, **__: object) -> None:
        folders.append(Path(computation.folder))
        assert (folders[0] / "w.safetensors").is_file()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(verify, "compute", end)
    factory, launcher = f"{__name__}:net", LocalLauncher()
    with pytest.raises(SystemExit) as caught:
        verify.verify(result, factory=factory, loss="cross_entropy", n_cores=2, launcher=launcher)
    assert caught.value.code == 143
    assert not folders[0].exists()
