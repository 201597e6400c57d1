"""Prediction in one process, and what is refused; by machines: `tests/processes`."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file as load_arrays, save_file as save_arrays
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner
from typing_extensions import override

import distbelief
from distbelief.cli.main import app
from distbelief.core.errors import JobError, StorageError
from distbelief.job import predict as predict_module
from distbelief.job.predict import predict
from distbelief.job.run.directory import RunDirectory
from distbelief.task.data import Batch
from distbelief.worker.computation import Computation
from tests.distbelief.jobs import small


HERE = __name__
JOB = small(f"{HERE}:net", f"{HERE}:net")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path / "run")
    run.write(run.job_file, JOB)
    torch.manual_seed(3)
    save_file(net().state_dict(), run.model_file)
    return run


def inputs_at(path: Path, *, n: int = 300) -> NDArray[np.float32]:
    inputs = np.random.default_rng(0).random((n, 5), np.float32)
    if path.suffix == ".npy":
        np.save(path, inputs)
    else:
        save_arrays({"anything": inputs}, path)
    return inputs


@pytest.fixture
def source(tmp_path: Path) -> Path:
    inputs_at(tmp_path / "in.npy")
    return tmp_path / "in.npy"


def refuses(
    run: RunDirectory, source: Path, claim: str, *, error: type[Exception] = JobError
) -> None:
    with pytest.raises(error, match=claim):
        predict(run.path, source)


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_outputs_are_the_plain_modules(suffix: str, run: RunDirectory, tmp_path: Path) -> None:
    source = tmp_path / f"in{suffix}"
    inputs = inputs_at(source)
    done = predict(run.path, source)
    assert done.out == tmp_path / f"in.outputs{suffix}"
    assert (done.shape, done.n_machines) == ((300, 3), 1)
    torch.manual_seed(3)
    expected = net().eval()(torch.from_numpy(inputs)).detach().numpy()
    found = np.load(done.out) if suffix == ".npy" else load_arrays(done.out)["outputs"]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert done.labels == tuple(expected[:10].argmax(1))
    said = predict_module.text(done)
    assert said.startswith(f"{done.out}: outputs 300 x 3, by one process, in ")
    assert '"shape":[300,3]' in predict_module.as_json(done)


class Several(nn.Module):
    """Takes two tensors; of what it returns, two have a row for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    @override
    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> object:
        y = self.layer(x)
        factor = 1.0 if scale is None else scale.unsqueeze(1)
        return {"scaled": y * factor, "logits": y, "norm": self.layer.weight.norm(), "none": None}


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_several_inputs_outputs_are_named(suffix: str, run: RunDirectory, tmp_path: Path) -> None:
    run.write(run.job_file, JOB.replace(f"{HERE}:net", f"{HERE}:Several"))
    module = Several()
    save_file(module.state_dict(), run.model_file)
    source = tmp_path / f"in{suffix}"
    generator = np.random.default_rng(0)
    given: dict[str, NDArray[np.float32 | np.int64]] = {
        "x": generator.random((300, 5), np.float32),
        "scale": np.full(300, 2, np.int64),
    }
    if suffix == ".npz":
        np.savez(source, allow_pickle=False, **given)
    else:
        save_arrays(given, source)
    done = predict(run.path, source)
    found = dict(np.load(done.out)) if suffix == ".npz" else load_arrays(done.out)
    expected = module.layer(torch.from_numpy(given["x"])).detach().numpy()
    assert found.keys() == {"scaled", "logits"}
    np.testing.assert_allclose(found["logits"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["scaled"], 2 * expected, rtol=1e-5)
    assert done.labels == tuple(expected[:10].argmax(1))
    assert "scaled 300 x 3, logits 300 x 3, by one process" in predict_module.text(done)
    assert '"outputs":{"scaled":[300,3],"logits":[300,3]}' in predict_module.as_json(done)
    np.save(tmp_path / "one.npy", given["x"])
    assert predict(run.path, tmp_path / "one.npy").out == tmp_path / "one.outputs.npz"
    with pytest.raises(JobError, match=r"holds one array, .*scaled, logits: use \.npz or"):
        predict(run.path, source, out=tmp_path / "o.npy")
    save_arrays(given | {"scales": given["scale"]}, tmp_path / "typo.safetensors")
    refuses(run, tmp_path / "typo.safetensors", r"takes \(x, scale\): .*argument 'scales'")
    np.savez(tmp_path / "short.npz", allow_pickle=False, x=given["x"], scale=given["scale"][:9])
    refuses(run, tmp_path / "short.npz", r"has 'x' of shape \[300, 5\]|has 'scale' of shape \[9\]")


def test_the_inputs_may_be_of_another_precision(run: RunDirectory, tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.ones((2, 5)))
    assert predict(run.path, tmp_path / "in.npy", out=tmp_path / "o.npy").out.is_file()


def test_a_run_without_a_model_is_told_how_to_go_on(run: RunDirectory, source: Path) -> None:
    run.model_file.unlink()
    refuses(run, source, r"does not exist: the run .*Ctrl")
    run.close()
    refuses(run, source, r"does not exist: .*--resume")


def test_where_outputs_cannot_be_nothing_is_computed(
    run: RunDirectory, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That there is no such directory was told when all was computed, and lost."""

    def compute(*_: object) -> None:
        pytest.fail("it has computed")

    monkeypatch.setattr(predict_module, "_whole", compute)
    with pytest.raises(StorageError, match=r"cannot write .*nowhere.*--out"):
        predict(run.path, source, out=source.parent / "nowhere" / "o.npy")


def words() -> nn.Module:
    return nn.Embedding(50, 3)


def test_words_that_the_model_does_not_know_are_refused(run: RunDirectory, source: Path) -> None:
    run.write(run.job_file, JOB.replace(f"{HERE}:net", f"{HERE}:words"))
    save_file(words().state_dict(), run.model_file)
    np.save(source, np.full((2, 4), 50))
    refuses(run, source, r"int64 of shape \(2, 4\): index out of range")


def test_other_kinds_of_files_are_refused(run: RunDirectory, source: Path) -> None:
    refuses(run, source.with_suffix(".csv"), r"in\.csv: use a file \.npy, \.npz or \.safetensors")
    with pytest.raises(JobError, match=r"out\.txt: use a file"):
        predict(run.path, source, out=source.parent / "out.txt")


def test_one_sample_without_a_first_dimension_is_refused(
    run: RunDirectory, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: BatchNorm's ValueError was called unexpected."""

    def refuse(*_: object) -> None:
        raise ValueError("expected 2D or 3D input (got 1D input)")

    monkeypatch.setattr(Batch, "run", refuse)
    refuses(run, source, r"does not take float32 .*expected 2D or 3D input \(got 1D input\)")


def test_what_is_no_input_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    path = tmp_path / "in.npy"
    refuses(run, path, r"cannot read .*in\.npy", error=StorageError)
    path.write_bytes(b"no array")
    refuses(run, path, "is not a plain array")
    np.save(path, np.array([{}], object), allow_pickle=True)
    refuses(run, path, "is not a plain array")  # objects are not unpickled
    for empty in (np.float32(1.0), np.zeros((0, 5), np.float32)):
        np.save(path, empty)
        refuses(run, path, "at least one sample")
    np.save(path, np.ones((2, 4), np.float32))
    refuses(run, path, r"does not take float32 of shape \(2, 4\)")
    several = tmp_path / "in.safetensors"
    save_arrays({"a": np.ones(2), "b": np.ones(2)}, several)
    refuses(run, several, r"inputs.a, inputs.b, but forward of .*:net takes \(input\): missing")


@pytest.mark.parametrize("dtype", [">f4", "f2", "f8"])
def test_numbers_of_any_make_are_inputs(dtype: str, run: RunDirectory, tmp_path: Path) -> None:
    """Those of another byte order ended in a ValueError of torch's."""
    inputs = inputs_at(tmp_path / "in.npy", n=4)
    predict(run.path, tmp_path / "in.npy", out=tmp_path / "usual.npy")
    np.save(tmp_path / "in.npy", inputs.astype(dtype))
    predict(run.path, tmp_path / "in.npy", out=tmp_path / "other.npy")
    usual, other = np.load(tmp_path / "usual.npy"), np.load(tmp_path / "other.npy")
    np.testing.assert_allclose(other, usual, atol=1e-2)


def test_numbers_that_no_model_takes_are_refused(run: RunDirectory, source: Path) -> None:
    """By a plan complex ones were taken for whole numbers, and lost what they had."""
    for odd, shown in (("c8", "complex64"), ("U3", "<U3"), ("M8[s]", "datetime64")):
        np.save(source, np.zeros((2, 5), odd))
        refuses(run, source, rf"in\.npy has type {shown}")
    np.save(source, np.zeros((2, 5), np.uint8))
    refuses(run, source, r"uint8 of shape \(2, 5\): ")


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))


def test_a_model_of_another_source_is_refused(run: RunDirectory, source: Path) -> None:
    """It was a RuntimeError of torch's, or with a plan one of some machine."""
    run.write(run.job_file, JOB.replace(f"{HERE}:net", f"{HERE}:wider"))
    refuses(run, source, r"does not fit .*:wider: '0.bias' is \[3\] in the file, \[4\]")
    run.write(run.job_file, JOB.replace(f"{HERE}:net", f"{HERE}:words"))
    refuses(run, source, r"'0.bias' is \[3\] in the file, absent in the source")


def test_a_damaged_model_is_told(run: RunDirectory, source: Path) -> None:
    run.model_file.write_bytes(run.model_file.read_bytes()[:100])
    refuses(run, source, r"model\.safetensors is damaged: ", error=StorageError)


def test_the_command_line_tells_a_mistake_in_a_sentence(run: RunDirectory, source: Path) -> None:
    done = CliRunner().invoke(app, ["predict", str(run.path), str(source), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["shape"] == [300, 3]
    failed = CliRunner().invoke(app, ["predict", str(source.parent), str(source)])
    assert failed.exit_code == 2
    assert "is not a run directory" in failed.stderr


def save_plan(run: RunDirectory) -> None:
    outlook = distbelief.plan(net(), torch.zeros(8, 5), loss="cross_entropy", machines=(2,))
    outlook.save(run.plan_file)


def test_a_run_of_gpus_is_told_how_to_predict_without(
    run: RunDirectory, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained where there is a GPU, used where there is none: each machine ended in
    torch's traceback.
    """
    save_plan(run)
    run.write(run.job_file, JOB + '[cluster]\npartitions = 2\ndevice = "cuda"\n')
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuses(run, source, r"'cuda': torch .* sees no GPU .*--whole")
    assert predict(run.path, source, whole=True).shape == (300, 3)


def test_sigterm_leaves_no_folder_behind(
    run: RunDirectory, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM ended it at once; its folder, inputs and all, stayed in /tmp."""
    save_plan(run)
    folders: list[Path] = []

    def end(_: object, computation: Computation, **__: object) -> None:
        folders.append(Path(computation.folder))
        assert folders[0].is_dir()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(predict_module, "compute", end)
    with pytest.raises(SystemExit) as caught:
        predict(run.path, source)
    assert caught.value.code == 143
    assert not folders[0].exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_inputs_beyond_the_models_type_are_refused(run: RunDirectory, tmp_path: Path) -> None:
    """They became infinite, and the outputs NaN."""
    inputs = np.ones((400, 5))
    inputs[300, 2] = 1e300
    np.save(tmp_path / "in.npy", inputs)
    refuses(run, tmp_path / "in.npy", r"inputs have 1e\+300 at \[300, 2\], beyond torch.float32")
