"""Models of public libraries, from their configurations: nothing is downloaded.

`models.toml` lists them. Each has two sizes: the published one (of large models with fewer layers),
which is planned without its memory, and a small one, which is run: "experiments.zoo.models:gpt2".
"""

import importlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.graph.capture import InputSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    make: Callable[[], nn.Module]
    inputs: Sequence[InputSpec]
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    title: str
    kind: str  # "transformer", "convolutional" or "other"
    published: Size
    small: Size


class Scores(nn.Module):
    """A model's scores with the classes first, as torch's losses want them: (batch, classes, n).

    If there are more names than inputs, the last input has them all.
    """

    def __init__(self, inner: nn.Module, names: Sequence[str], result: str = "logits") -> None:
        super().__init__()
        self.inner = inner
        self.names = names
        self.result = result

    @override
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        last = [inputs[-1]] * (len(self.names) - len(inputs))
        outputs = self.inner(**dict(zip(self.names, [*inputs, *last], strict=True)))
        scores: torch.Tensor = getattr(outputs, self.result)
        return scores.transpose(1, -1)


class Steps(nn.Module):
    """A recurrent layer, and scores of 40 sounds for each step: (batch, sounds, steps)."""

    def __init__(self, inner: nn.RNNBase) -> None:
        super().__init__()
        self.inner = inner
        self.last = nn.Linear(inner.hidden_size * (1 + inner.bidirectional), 40)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.inner(x)
        scores: torch.Tensor = self.last(states)
        return scores.transpose(1, 2)


# What small models of transformers have, where the table says nothing else.
_SMALL: Final = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def library(name: str) -> Any:  # noqa: ANN401 -- of an extra
    # PyPI's torchvision is compiled for torch with CUDA: beside another torch its own operators
    # are missing, and it fails where it decorates these two, which no model here uses.
    if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms"):
        for missing in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{missing}", "(Tensor a, Tensor b, float c) -> Tensor"
            )
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise JobError(f"{error}: run pip install 'distbelief[zoo]'") from error


def _make(entry: Mapping[str, Any], options: Mapping[str, Any]) -> nn.Module:
    if "timm" in entry:
        found = library("timm").create_model(entry["timm"], pretrained=False, **options)
    elif "torchvision" in entry:
        found = library("torchvision.models").get_model(
            entry["torchvision"], weights=None, **options
        )
    elif "torch" in entry:
        found = Steps(getattr(nn, entry["torch"])(batch_first=True, **options))
    else:
        found_in = library("transformers")
        model, config = (getattr(found_in, name) for name in entry["classes"].split())
        names = entry.get("inputs", ["input_ids"])
        found = Scores(model(config(**options)), names, entry.get("result", "logits"))
    assert isinstance(found, nn.Module)
    return found


def _input(text: str, *, n_words: int) -> InputSpec:
    word, _, length = text.rpartition(" ")
    shape = tuple(map(int, length.split("x")))
    return InputSpec(shape=shape, n_values=n_words if word else None)


def _model(entry: Mapping[str, Any]) -> Model:
    of_transformers = "classes" in entry
    published = entry.get("published", {})
    less = _SMALL if of_transformers else published
    if "timm" in entry or "torchvision" in entry:
        less = {"num_classes": 10, **published}
    if "sizes" in entry:
        sizes = entry["sizes"]
    elif entry.get("inputs") == ["pixel_values"]:
        sizes = [["3x224x224"], ["3x32x32"]]
    else:
        sizes = [["words 512"], ["words 16"]] if of_transformers else [["3x224x224"], ["3x64x64"]]
    large, small = (
        Size(
            make=partial(_make, entry, options),
            inputs=[_input(text, n_words=n_words) for text in texts],
            batch=batch,
        )
        for texts, options, n_words, batch in zip(
            sizes, (published, less | entry.get("small", {})), (1000, 96), (16, 4), strict=True
        )
    )
    return Model(
        title=entry["title"],
        kind=entry.get("kind", "transformer" if of_transformers else "convolutional"),
        published=large,
        small=small,
    )


MODELS: Final[Mapping[str, Model]] = {
    name: _model(entry)
    for name, entry in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
}


def __getattr__(name: str) -> Callable[[], nn.Module]:
    if name not in MODELS:
        raise AttributeError(name)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return MODELS[name].small.make()

    return make
