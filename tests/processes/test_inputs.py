"""A model with several inputs and outputs, as a user runs it: train, predict, verify."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.distbelief.jobs import small
from tests.processes.commands import said, sets, train


pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = """
import torch
from torch import nn


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 16)
        self.head = nn.Linear(16, 9)

    def forward(self, words, mask=None, labels=None):
        hidden = self.embed(words)
        if mask is not None:
            hidden = hidden.masked_fill(~mask.unsqueeze(-1), 0.0)
        logits = self.head(hidden)
        outputs = {"logits": logits, "pooled": hidden.mean(1), "cache": None}
        if labels is not None:
            outputs["loss"] = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return outputs


class Successors:
    def __init__(self, n):
        generator = torch.Generator().manual_seed(n)
        self.words = torch.randint(9, (n, 6), generator=generator)
        self.mask = torch.arange(6) < torch.randint(2, 7, (n, 1), generator=generator)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words, mask = self.words[index], self.mask[index]
        labels = ((words + 1) % 9).masked_fill(~mask, -100)
        return {"words": words, "mask": mask, "labels": labels, "length": mask.sum()}
"""

JOB = small(
    "reader:Reader",
    "reader:Successors",
    """
[data.train.arguments]
n = 400
[data.test]
factory = "reader:Successors"
arguments = { n = 50 }
[output]
directory = "runs/reader"
""",
    loss="model",
    rule='name = "adagrad", learning_rate = 0.1',
    epochs=3,
)


@pytest.mark.soak
@pytest.mark.parametrize("partitions", [1, 2])
def test_a_model_with_its_own_loss_learns_and_predicts(tmp_path: Path, partitions: int) -> None:
    (tmp_path / "reader.py").write_text(MODEL)
    (tmp_path / "reader.toml").write_text(JOB)
    split = sets("cluster.partitions=2") if partitions == 2 else ()
    with train(tmp_path, *split, run="reader", job=("reader.toml",)) as command:
        command.ends(seconds=300.0)
    summary = command.summary()
    assert summary["metric_name"] == "loss"
    assert summary["metric"] < 0.2, command.output
    sys.path.insert(0, str(tmp_path))
    try:
        import reader  # type: ignore[import-not-found]  # noqa: PLC0415 -- it was just written
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("reader", None)
    module: nn.Module = reader.Reader()
    module.load_state_dict(load_file(command.run / "model.safetensors"))
    items = reader.Successors(20)
    np.savez(tmp_path / "in.npz", words=items.words.numpy(), mask=items.mask.numpy())
    with torch.no_grad():
        expected = module(items.words, items.mask)
    for extra in ([], ["--whole"]):
        told = json.loads(said(tmp_path, "predict", str(command.run), "in.npz", "--json", *extra))
        assert told["machines"] == (1 if extra else partitions)
        assert told["outputs"] == {"logits": [20, 6, 9], "pooled": [20, 16]}
        with np.load(tmp_path / "in.outputs.npz") as found:
            for name in ("logits", "pooled"):
                np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.soak
def test_inputs_by_keyword_are_verified(tmp_path: Path) -> None:
    (tmp_path / "reader.py").write_text(MODEL)
    words = ["partition", "reader:Reader", "--loss", "model", "--batch", "6", "--machines", "2"]
    for given in ("words=6:9", "mask=6:bool", "labels=6:9"):
        words += ["--input", given]
    found = json.loads(said(tmp_path, *words, "--exactly", "--verify", "--json"))["verified"]
    assert found["passed"]
    assert {"loss", "embed.weight", "head.weight", "head.bias"} == set(found["errors"])
