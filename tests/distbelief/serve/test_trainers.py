"""`DownpourSGD` and `Exchange` inside trainers of other libraries, against plain torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import distbelief
from distbelief.parameter_server.rules import TORCH_RULES, UpdateRule
from tests.distbelief.serve.loops import Server


RATE = 0.01
N_STEPS = 40  # of two epochs
ADAMW = TORCH_RULES["AdamW"]
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of the libraries
    pytest.mark.untraced,
    pytest.mark.timeout(180),
]

Make = Callable[[nn.Module], Optimizer]
Schedule = Callable[[Optimizer], Any] | None
Train = Callable[..., nn.Module]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))


def data() -> TensorDataset:
    inputs = torch.randn(8 * N_STEPS // 2, 7, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :3].sin())


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, targets)


def nothing(optimizer: Optimizer) -> Any:  # noqa: ANN401 -- as torch's
    return lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)


def cosine(optimizer: Optimizer) -> Any:  # noqa: ANN401 -- as torch's
    return lr_scheduler.CosineAnnealingLR(optimizer, N_STEPS)


def by_lightning(
    make: Make, schedule: Schedule, folder: Path, *, clip: float = 0.0, n: int = 1
) -> nn.Module:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return loss_of(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> object:
            optimizer = make(self.net)
            if schedule is None:
                return optimizer
            each = {"scheduler": schedule(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": each}

        def on_train_end(self) -> None:
            end(self.optimizers())

    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=clip or None,
        accumulate_grad_batches=n,
        default_root_dir=folder,
    )
    module = Module()
    trainer.fit(module, DataLoader(data(), batch_size=8))
    return module.net


def by_fabric(
    make: Make, schedule: Schedule, folder: Path, *, clip: float = 0.0, n: int = 1
) -> nn.Module:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    fabric = lightning.Fabric(accelerator="cpu")
    given = net()
    model, optimizer = fabric.setup(given, make(given))
    follows = schedule and schedule(optimizer)
    for epoch in range(2):
        for step, (inputs, targets) in enumerate(fabric.setup_dataloaders(batches())):
            fabric.backward(loss_of(model(inputs), targets) / n)
            if (step + 1) % n == 0:
                if clip:
                    fabric.clip_gradients(model, optimizer, max_norm=clip)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                if follows:
                    follows.step()
        state = {"model": model, "optimizer": optimizer}
        fabric.save(folder / f"{epoch}.ckpt", state)
        fabric.load(folder / f"{epoch}.ckpt", state)  # of just now
    end(optimizer)
    return given


def by_accelerate(
    make: Make, schedule: Schedule, folder: Path, *, clip: float = 0.0, n: int = 1
) -> nn.Module:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=n)
    given = net()
    ours = make(given)
    model, optimizer, loader = accelerator.prepare(given, ours, batches())
    follows = schedule and accelerator.prepare(schedule(ours))
    for _epoch in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(inputs), targets))
                if clip:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                if follows:
                    follows.step()
                optimizer.zero_grad()
        accelerator.save_state(str(folder / "state"))
        accelerator.load_state(str(folder / "state"))
    end(ours)
    return given


def by_transformers(
    make: Make, schedule: Schedule, folder: Path, *, clip: float = 0.0, n: int = 1
) -> nn.Module:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        @override
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = self.net(x)
            return {"loss": loss_of(outputs, labels), "logits": outputs}

    model = Model()
    optimizer = make(model.net)
    options = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        num_train_epochs=2,
        max_grad_norm=clip,
        gradient_accumulation_steps=n,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="epoch",
    )
    samples = [{"x": x, "labels": y} for x, y in map(data().__getitem__, range(len(data())))]
    given = (optimizer, schedule and schedule(optimizer))
    transformers.Trainer(model, options, train_dataset=samples, optimizers=given).train()
    end(optimizer)
    return model.net


def batches() -> DataLoader[Any]:
    return DataLoader(data(), batch_size=8, shuffle=True, generator=torch.Generator())


def end(optimizer: Any) -> None:  # noqa: ANN401 -- a wrapper, or what is wrapped
    if isinstance(optimizer, distbelief.DownpourSGD | distbelief.Exchange):
        optimizer.finish()


def plain(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


trainers = pytest.mark.parametrize(
    "train", [by_lightning, by_fabric, by_accelerate, by_transformers]
)


@trainers
@pytest.mark.parametrize(
    ("lr", "schedule", "options"),
    [(None, nothing, {}), (RATE, cosine, {"clip": 0.05, "n": 2})],
    ids=["a scheduler that changes nothing", "scheduler, clipping, accumulation"],
)
def test_one_worker_is_plain_torch_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    train: Train,
    lr: float | None,
    schedule: Schedule,
    options: dict[str, Any],
) -> None:
    expected = train(plain, schedule, tmp_path / "plain", **options)
    rule: UpdateRule = ADAMW(learning_rate=RATE)
    server = Server(list(net().parameters()), rule=rule, n_shards=1)

    def ours(model: nn.Module) -> Optimizer:
        return server.optimizer(monkeypatch, model.named_parameters(), lr=lr, blocking=True)

    found = train(ours, schedule, tmp_path / "ours", **options)
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


@trainers
def test_an_exchange_is_its_inner_optimizer_but_for_rounding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, train: Train
) -> None:
    expected = train(plain, cosine, tmp_path / "plain", clip=0.05)
    server = Server(list(net().parameters()), rule=distbelief.SGD(learning_rate=1.0), n_shards=1)

    def ours(model: nn.Module) -> Optimizer:
        return server.exchange(monkeypatch, plain(model), every=4)

    found = train(ours, cosine, tmp_path / "ours", clip=0.05)
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-6)
