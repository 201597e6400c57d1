"""What roles of other machines are told."""

from pathlib import Path

import msgspec
import pytest

from distbelief.cluster.bootstrap import patience_of, read_job_spec, relocated, write_job_spec
from distbelief.config.load import job_from_json
from distbelief.errors import JobError
from distbelief.launch.role_process import RoleSpec
from distbelief.parameter_server.layout import Layout, TensorSpec
from tests.distbelief.jobs import speech


def spec_of(*overrides: str, memory: str = "/dev/shm/x") -> RoleSpec:
    job = speech(*overrides, path="/home/ada/nets/speech.toml")
    layout = Layout.of([TensorSpec(name="w", shape=(3, 2), kind="parameter")], n_shards=1)
    return RoleSpec(
        job=msgspec.Raw(job.to_json()),
        run="name",
        supervisor="tcp://127.0.0.1:1",
        memory=memory,
        snapshots="/home/ada/runs/x/snapshots",
        layout=layout.spec,
        initials={},
        initial_file="/home/ada/weights.safetensors",
        plan="/home/ada/plan.json",
    )


def test_a_brief_has_the_plan_and_no_path_of_the_supervisors(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    content = write_job_spec(spec_of(), plan=plan)
    brief = read_job_spec(content)
    assert brief.plan == "{}"
    assert brief.shares
    assert not any((brief.spec.memory, brief.spec.snapshots, brief.spec.supervisor))
    assert brief.spec.initial_file is None
    assert brief.spec.plan is None
    assert not read_job_spec(write_job_spec(spec_of(memory=""), plan=None)).shares


def test_a_host_knows_from_the_job_spec_how_long_to_wait_for_the_supervisor() -> None:
    assert patience_of(spec_of().job) == 600.0
    assert patience_of(spec_of("cluster.patience=90 s").job) == 90.0
    with pytest.raises(JobError, match="job cannot be read"):
        patience_of(msgspec.Raw(b"[1"))


def test_a_job_looks_for_its_files_where_the_host_has_them(tmp_path: Path) -> None:
    spec = spec_of('data.train.arguments={ files = ["./a.npy", "../b.npy"], other = "/data/c" }')
    job = job_from_json(bytes(relocated(spec.job, tmp_path)))
    here = str(tmp_path)
    assert job.import_paths == (here,)
    assert job.data.train.arguments == {
        "files": [f"{here}/a.npy", "/home/ada/b.npy"],
        "other": "/data/c",
    }
    assert job.source == "/home/ada/nets/speech.toml"


@pytest.mark.parametrize("content", [b"", b"{}", b'{"spec":{"job":1}}', b"\xff"])
def test_an_invalid_job_spec_is_rejected(content: bytes) -> None:
    with pytest.raises(JobError, match="same version"):
        read_job_spec(content)


@pytest.mark.parametrize("job", [b"1", b"{}", b'{"source":{"import_paths":[1]}}', b'{"\xd8":1}'])
def test_an_invalid_job_is_rejected(job: bytes) -> None:
    with pytest.raises(JobError, match="job cannot be read"):
        relocated(msgspec.Raw(job), Path())
