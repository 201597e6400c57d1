"""Models, data sets and losses that the jobs of these tests name by import path.

Valid ones first, then one for each mistake that a user may make.
"""

import math
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from typing_extensions import override

from distbelief.graph.region import Shape
from distbelief.parameter_server.initial_values import Initial
from distbelief.task.data import Batch
from distbelief.task.forward import Sample


HERE = "tests.distbelief.examples"
NOT_CALLABLE = 3


class Frames:
    """Samples of two classes that a line separates."""

    def __init__(
        self,
        *,
        n_samples: int = 64,
        width: int = 4,
        dtype: torch.dtype = torch.float32,
        n_classes: int = 2,
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(n_samples, width, generator=generator, dtype=dtype)
        self.targets = (self.inputs.sum(1) > 0).long() % n_classes

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: list[int]) -> object:
        return self.inputs[indices], self.targets[indices]


def frames(*, n_samples: int = 64, width: int = 4) -> Frames:
    return Frames(n_samples=n_samples, width=width)


class Numbered:
    """Samples that are their own numbers; some may be not finite."""

    def __init__(self, *, n_samples: int = 64, bad: Sequence[int] = ()) -> None:
        self.n_samples = n_samples
        self.bad = set(bad)

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        factor = math.nan if index in self.bad else 1.0
        return torch.tensor(index), torch.tensor(factor)


class NumberedStream:
    """The same, one after the other."""

    def __init__(self, samples: Numbered) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (self.samples[index] for index in range(len(self)))


def numbered_stream(*, n_samples: int = 64, bad: Sequence[int] = ()) -> NumberedStream:
    return NumberedStream(Numbered(n_samples=n_samples, bad=bad))


class NumberedPieces:
    """The same in pieces of so many rows, of which some are here."""

    def __init__(
        self, rows: Sequence[int], here: Sequence[int] | None, *, fetches: bool, bad: Sequence[int]
    ) -> None:
        self.samples = Numbered(n_samples=sum(rows), bad=bad)
        self.rows = {f"piece-{k:03d}": n for k, n in enumerate(rows)}
        names = list(self.rows)
        self.near = set(names if here is None else [names[k] for k in here])
        if here is not None:
            self.here = lambda: sorted(self.near)
        if fetches:
            self.fetch = self.near.add

    def pieces(self) -> dict[str, int]:
        return self.rows

    def read(self, piece: str, rows: Sequence[int]) -> object:
        assert piece in self.near, piece
        assert len({*rows}) == len(rows)
        assert max(rows) < self.rows[piece]
        start = sum(n for name, n in self.rows.items() if name < piece)
        return [self.samples[start + row] for row in rows]


def numbered_pieces(
    *,
    rows: Sequence[int],
    here: Sequence[int] | None = None,
    fetches: bool = False,
    bad: Sequence[int] = (),
) -> NumberedPieces:
    return NumberedPieces(rows, here, fetches=fetches, bad=bad)


class FramesInPieces:
    """`Frames` in pieces that everybody reads."""

    def __init__(self, rows: Sequence[int], width: int) -> None:
        self.frames = Frames(n_samples=sum(rows), width=width)
        self.rows = {f"piece-{k:03d}": n for k, n in enumerate(rows)}

    def pieces(self) -> dict[str, int]:
        return self.rows

    def read(self, piece: str, rows: Sequence[int]) -> object:
        start = sum(n for name, n in self.rows.items() if name < piece)
        return self.frames[[start + row for row in rows]]  # type: ignore[index]


def frames_in_pieces(*, rows: Sequence[int], width: int = 4) -> FramesInPieces:
    return FramesInPieces(rows, width)


class Counts(nn.Module):
    """One weight per sample and row: with `minus_sum` and SGD at rate 1, how often each counted."""

    def __init__(self, *, n_samples: int = 64, n_rows: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n_rows, n_samples))

    @override
    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.weight[:, numbers].sum(0)


class Tally(nn.Module):
    """As `Counts`, with the rows of two tables, which ranks can share among them."""

    def __init__(self, *, n_samples: int = 64, n_rows: int = 8) -> None:
        super().__init__()
        self.first = nn.Embedding(n_samples, n_rows)
        self.second = nn.Embedding(n_samples, n_rows)
        for table in (self.first, self.second):
            nn.init.zeros_(table.weight)

    @override
    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        both: torch.Tensor = self.first(numbers) + self.second(numbers)
        return both.sum(1)


def minus_mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -(outputs * targets).mean()


def minus_sum(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -(outputs * targets).sum()


def net(*, width: int = 4, hidden: Sequence[int] = (8,), n_classes: int = 2) -> nn.Module:
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.Tanh()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, n_classes))


def everything_net(*, width: int = 4, n_classes: int = 2) -> nn.Module:
    """Return a model with everything that makes flat tensors difficult."""
    return Everything(width, n_classes)


class Everything(nn.Module):
    """Shared, frozen, unused and transposed parameters; buffers of all kinds."""

    constant: torch.Tensor
    rebound: torch.Tensor

    def __init__(self, width: int, n_classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.again = self.first  # shared module
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.first.weight  # shared parameter
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(requires_grad=False)
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.transposed = nn.Parameter(torch.randn(n_classes, width).t())
        self.register_buffer("constant", torch.ones(2), persistent=False)
        self.register_buffer("rebound", torch.zeros(1))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(self.first(x)) + self.tied(x)
        x = self.frozen(self.norm(x)) * self.scale
        self.rebound = self.rebound + 1.0  # bound anew, not changed in place
        return x @ self.transposed


def dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 2))


# ------------------------------------------------------------------- mistakes


def no_module() -> object:
    return [1, 2]


def module_class() -> object:
    return nn.Identity


def failing(*, size: int) -> nn.Module:
    raise KeyError(size)


def exits() -> nn.Module:
    sys.exit(3)


def lazy_net() -> nn.Module:
    return nn.LazyLinear(3)


def nothing_to_train() -> nn.Module:
    return net().requires_grad_(requires_grad=False)


def no_parameters() -> nn.Module:
    return nn.Identity()


def nan_net() -> nn.Module:
    module = nn.Linear(4, 2)
    nn.init.constant_(module.weight, float("nan"))
    return module


class Wrapped(nn.Module):
    """Returns an invalid result made from a layer's outputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.kind = kind

    @override
    def forward(self, x: torch.Tensor) -> object:
        outputs = self.layer(x)
        match self.kind:
            case "tuple":
                return outputs, outputs.exp()
            case "scalar":
                return outputs.sum()
            case "detached":
                return outputs.detach()
            case "root":
                return (outputs * 0.0).square().sum(1, keepdim=True).sqrt()
            case _:
                raise RuntimeError("a bug of the user's")


def wrapped(*, kind: str) -> nn.Module:
    return Wrapped(kind)


def embedding_net(
    *, n_words: int = 10, max_norm: float | None = None, sparse: bool = False
) -> nn.Module:
    table = nn.Embedding(n_words, 2, max_norm=max_norm, sparse=sparse)
    return nn.Sequential(table, nn.Flatten(), nn.Linear(8, 2))


def conv_net() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 4, 2), nn.Flatten(), nn.LazyLinear(2))


def empty() -> object:
    return []


def no_dataset() -> object:
    return 7


class Lost(Frames):
    @override
    def __len__(self) -> int:
        raise OSError("no index")


class Damaged(Frames):
    @override
    def __getitems__(self, indices: list[int]) -> object:
        raise ValueError("this sample is damaged")


def double_frames() -> Frames:
    return Frames(dtype=torch.float64)


def bad_labels() -> Frames:
    dataset = Frames()
    dataset.targets[13] = 5
    return dataset


def float_labels() -> list[tuple[torch.Tensor, float]]:
    return [(torch.zeros(4), 0.5)] * 8


def double_targets() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.zeros(4), torch.zeros(2, dtype=torch.float64))] * 8


def flat_targets() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.zeros(4), torch.zeros(()))] * 8


def narrow_targets() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.zeros(4), torch.zeros(1))] * 8


def wide_labels() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.zeros(4), torch.zeros(3, dtype=torch.int64))] * 8


def nan_frames() -> Frames:
    dataset = Frames()
    dataset.inputs[9, 2] = float("nan")
    return dataset


def tokens() -> list[tuple[torch.Tensor, int]]:
    return [(torch.tensor([0, 3, 12, 1]), 1)] * 8


def loss_per_sample(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, targets)


def own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def failing_function(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise ValueError(f"no such thing: {outputs.ndim} {targets.ndim}")


def listing(outputs: torch.Tensor, targets: torch.Tensor) -> object:
    return [outputs, targets]


def mean_output(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean() + 0.0 * targets.float().mean()


def a_sample(
    shape: Shape, target: Shape = (), *, words: bool = False, labels: bool = False
) -> Sample:
    """Return the description of a pair of an input and a target of these shapes."""
    kinds = torch.float32, torch.int64
    return Sample.of(
        Batch(
            torch.zeros(1, *shape, dtype=kinds[words]), torch.zeros(1, *target, dtype=kinds[labels])
        )
    )


def initials_of(module: nn.Module) -> dict[str, Initial]:
    """Return how shards draw the tensors of linear and convolutional layers and norms."""
    found: dict[str, Initial] = {}
    for name, tensor in sorted(module.state_dict().items()):
        values = tensor.reshape(-1)
        if (
            len(values) > 1 and bool((values == values[0]).all())
        ) or not tensor.is_floating_point():
            found[name] = Initial(distribution="constant", value=float(values[0]))
        else:
            weight = module.get_parameter(f"{name.rpartition('.')[0]}.weight".lstrip("."))
            bound = 1.0 / math.sqrt(weight[0].numel())
            found[name] = Initial(distribution="uniform", low=-bound, high=bound)
    return found


class F1:
    """F1 of class 1, over all samples: no mean over them. As torchmetrics' BinaryF1Score."""

    def __init__(self) -> None:
        self.counts = torch.zeros(3)

    def reset(self) -> None:
        self.counts = torch.zeros(3)

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        found, wanted = outputs.argmax(1) == 1, targets == 1
        parts = [(found & wanted).sum(), (found & ~wanted).sum(), (~found & wanted).sum()]
        self.counts = self.counts + torch.stack(parts)

    def compute(self) -> torch.Tensor:
        weights = torch.tensor([2.0, 1.0, 1.0])
        return 2 * self.counts[0] / (self.counts * weights).sum()


f1_object = F1()


def f1_of_a_part(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    f1 = F1()
    f1.update(outputs, targets)
    return f1.compute()


def own_accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).float().mean()
