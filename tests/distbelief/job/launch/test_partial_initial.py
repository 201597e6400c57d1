"""[model] initial = { file = ... }: what the file has is taken; all else is named, or drawn."""

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import TensorDataset
from typing_extensions import override

from distbelief.config.load import parse_job
from distbelief.core.errors import JobError
from distbelief.job.launch import preflight
from distbelief.task.initializers import InitialFile
from tests.distbelief.jobs import small


class Net(nn.Module):
    def __init__(self, *, classes: int = 2, ties: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, classes)
        if ties:
            self.again = self.head

    @override
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.body(inputs))
        return scores


def net(*, ties: bool = False) -> nn.Module:
    return Net(ties=ties)


def points() -> TensorDataset:
    return TensorDataset(torch.randn(9, 3), torch.zeros(9, dtype=torch.int64))


def values(
    folder: Path, state: dict[str, torch.Tensor], *, ties: bool = False, **choices: object
) -> dict[str, torch.Tensor]:
    """Return the initial values of a job that begins with a file of this state."""
    save_file(state, folder / "a.safetensors")
    initial = {"file": "a.safetensors", **choices}
    model = {"initial": initial, "seed": 5, "arguments": {"ties": ties}}
    text = small(f"{__name__}:net", f"{__name__}:points", model=model)
    job = parse_job(text, path=folder / "job.toml")
    assert isinstance(job.model.initial, InitialFile)
    assert job.model.initial.file == str(folder / "a.safetensors")
    written = folder / "initial.safetensors"
    found = preflight.answer_to(job, initial_file=str(written), plan="")
    assert found.initial_file == str(written)
    return load_file(written)


def drawn(*, ties: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return dict(net(ties=ties).state_dict())


def pretrained(classes: int = 2) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return dict(Net(classes=classes).state_dict())


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], prefix: str) -> bool:
    names = [name for name in wanted if name.startswith(prefix)]
    return bool(names) and all(torch.equal(found[name], wanted[name]) for name in names)


def test_what_the_file_has_is_taken_and_skipped_tensors_are_drawn(tmp_path: Path) -> None:
    state = pretrained(classes=7)  # of another head
    found = values(tmp_path, state, skip=["head.*"])
    assert equal(found, state, "body")
    assert equal(found, drawn(), "head")


def test_missing_tensors_are_named_or_drawn(tmp_path: Path) -> None:
    state = {name: one for name, one in pretrained().items() if not name.startswith("head")}
    text = r'lacks head\.bias, head\.weight: give missing = "draw", or add them to skip'
    with pytest.raises(JobError, match=text):
        values(tmp_path, state)
    found = values(tmp_path, state, missing="draw")
    assert equal(found, state, "body")
    assert equal(found, drawn(), "head")


def test_tensors_in_excess_are_named_also_where_missing_ones_are_drawn(tmp_path: Path) -> None:
    """With another prefix of all names the whole model would be drawn, without a word."""
    state = {f"model.{name}": one for name, one in pretrained().items()}
    text = r"has tensors that the model has not: model\.body\.0\.bias, .*: add them to skip"
    with pytest.raises(JobError, match=text):
        values(tmp_path, state, missing="draw")
    with pytest.raises(JobError, match="nothing is taken from it: leave initial out"):
        values(tmp_path, state, missing="draw", skip=["model.*"])


def test_tensors_of_another_shape_are_named(tmp_path: Path) -> None:
    text = r"other shapes: 'head\.bias' \[7\], in the model \[2\], 'head\.weight' \[7, 4\], "
    with pytest.raises(JobError, match=text):
        values(tmp_path, pretrained(classes=7), missing="draw")


def test_a_pattern_that_fits_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"skip has 'haed\.\*', and no tensor's name is like that"):
        values(tmp_path, pretrained(), skip=["haed.*"])


def test_tied_tensors_may_have_any_of_their_names(tmp_path: Path) -> None:
    state = pretrained()
    for file in (
        state,
        {name.replace("head", "again"): one for name, one in state.items()},
        state | {name.replace("head", "again"): one.clone() for name, one in state.items()},
    ):
        found = values(tmp_path, file, ties=True)
        heads = {name: one for name, one in found.items() if not name.startswith("body")}
        assert len(heads) == 2
        assert equal({n.replace("again", "head"): one for n, one in heads.items()}, state, "head")


def test_bfloat16_files_are_read(tmp_path: Path) -> None:
    state = {name: one.bfloat16() for name, one in pretrained().items()}
    found = values(tmp_path, state)
    assert equal(found, {name: one.float() for name, one in state.items()}, "body.0")


@pytest.mark.parametrize(
    ("initial", "text"),
    [
        ({"file": "a.pt"}, r"file is 'a\.pt'; use the path of a \.safetensors file"),
        ({"file": "none.safetensors"}, r"cannot read .*none\.safetensors"),
        ({"missing": "draw"}, "file"),
        ({"file": "a.safetensors", "missing": "ignore"}, "missing"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, initial: dict[str, object], text: str) -> None:
    tables = {"model": {"initial": initial}}
    with pytest.raises(JobError, match=text):  # noqa: PT012 -- either finds it
        job = parse_job(
            small(f"{__name__}:net", f"{__name__}:points", **tables), path=tmp_path / "job.toml"
        )
        preflight.answer_to(job, initial_file=str(tmp_path / "i.safetensors"), plan="")


def test_the_table_comes_back_from_the_stored_job(tmp_path: Path) -> None:
    model = {"initial": {"file": "a.safetensors", "missing": "draw", "skip": ["head.*"]}}
    text = small(f"{__name__}:net", f"{__name__}:points", model=model)
    job = parse_job(text, path=tmp_path / "job.toml")
    again = parse_job(job.to_toml(), path=tmp_path / "elsewhere" / "job.toml")
    assert msgspec.to_builtins(again.model) == msgspec.to_builtins(job.model)
