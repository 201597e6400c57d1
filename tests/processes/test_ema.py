"""Jobs whose rule averages the weights: saved beside the model, and carried on when resumed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import distbelief
from tests.distbelief.jobs import small


pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.usefixtures("forked_roles", "undrawn"),
]

MODULE = """
import torch
from torch import nn

def net():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[0].weight.requires_grad_(False)
    return model

def points():
    torch.manual_seed(1)
    inputs = torch.randn(64, 4)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))
"""


def averaged_data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    inputs = torch.randn(64, 4)
    return inputs, inputs[:, :3].argmax(1)


def test_an_average_is_saved_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "averaged.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    decay = 0.5
    tables: dict[str, dict[str, object]] = {
        "algorithm": {
            "rule": {"name": "sgd", "learning_rate": 0.1, "ema": decay},
            "blocking": True,
            "batch_size": 64,  # an epoch is one push
        },
        "data": {"test": {"factory": "averaged:points"}},
        "evaluation": {"averaged": True, "metric": "loss"},
        "cluster": {"shards": 2, "shard_copies": 2},
        "output": {"directory": "run", "keep": "best"},
    }

    def run(epochs: int) -> distbelief.Run:
        text = small("averaged:net", "averaged:points", **tables, stop={"epochs": epochs})
        (tmp_path / "job.toml").write_text(text)
        return distbelief.train("job.toml", show=False, resume="run" if epochs > 1 else None)

    average: dict[str, torch.Tensor] = {}
    runs = []
    for n in (1, 2, 3):
        runs.append(run(n))
        assert runs[-1].exit_code == 0, runs[-1].summary
        model = load_file(tmp_path / "run" / "model.safetensors")
        for name, value in model.items():
            if n == 1 or "running" in name or "num_batches" in name:
                average[name] = value
            else:
                average[name] = decay * average[name] + (1 - decay) * value
    saved, model = runs[-1].ema_model.state_dict(), runs[-1].model.state_dict()
    assert saved.keys() == average.keys() == model.keys()
    for name, value in saved.items():
        torch.testing.assert_close(value, average[name], rtol=1e-6, atol=1e-6)
    # Averages are evaluated, and kept where they are the best.
    inputs, targets = averaged_data()
    for name in ("ema_model", "best_model"):
        with torch.no_grad():
            loss = float(
                torch.nn.functional.cross_entropy(getattr(runs[-1], name)(inputs), targets)
            )
        assert runs[-1].summary.held_out_loss == pytest.approx(loss, rel=1e-5)
    assert torch.equal(saved["0.weight"], model["0.weight"])  # frozen
    assert not torch.equal(saved["2.weight"], model["2.weight"])


def test_without_a_decay_there_is_no_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "averaged.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(small("averaged:net", "averaged:points"))
    run = distbelief.train("job.toml", show=False)
    with pytest.raises(distbelief.StorageError, match="give the rule ema"):
        _ = run.ema_model
