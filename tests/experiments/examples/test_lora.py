"""LoRA by peft, in a loop and in a job: adapters alone are pushed and saved."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import distbelief
from tests.distbelief.jobs import small


pytest.importorskip("peft", reason='peft is not installed: pip install "distbelief[lora]"')
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(180)]
pytestmark += [pytest.mark.filterwarnings("ignore:::transformers"), pytest.mark.untraced]

ROOT = Path(__file__).parents[3]


def test_the_example_learns_what_plain_torch_does_and_saves_adapters(tmp_path: Path) -> None:
    from experiments.examples import lora  # noqa: PLC0415 -- it needs peft

    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "experiments.examples.lora", str(tmp_path / "adapter")]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    net: Any = lora.model()
    trained = [one for one in net.parameters() if one.requires_grad]
    loss = lora.train(net, torch.optim.AdamW(trained, lr=3e-2), n_steps=100)
    assert loss < 3.9  # it begins at 4.2
    assert float(run.stdout.split()[-1]) == pytest.approx(loss, rel=1e-3)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert saved
    assert all("lora_" in name for name in saved)


MODULE = """
import peft, torch
from torch import nn

def net():
    base = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 3))
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "2"]))

def points():
    torch.manual_seed(1)
    inputs = torch.randn(256, 20)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))
"""


def test_a_job_pushes_adapters_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapted.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    rule = {"name": "AdamW", "lr": 0.01}
    text = small(
        "adapted:net",
        "adapted:points",
        algorithm={"rule": rule},
        cluster={"shared_memory": False},
        output={"directory": "run"},
    )
    (tmp_path / "job.toml").write_text(text)
    run = distbelief.train("job.toml", show=False)
    assert run.exit_code == 0
    model: Any = run.model
    n_trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert run.summary.n_parameters == n_trained == 1246
    assert run.summary.bytes_in == 4 * n_trained * run.summary.pushes_applied
    model.save_pretrained("adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sum(one.numel() for one in saved.values()) == n_trained
