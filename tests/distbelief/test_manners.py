"""What programs that embed the library, shells and readers of `help` expect of it."""

import inspect
import json
import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import distbelief
import sandblaster
from distbelief.job.run_log import RunLog
from tests.distbelief.serve.loops import Server


ROOT = Path(__file__).parents[2]


def in_a_fresh_process(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    return done.stdout + done.stderr


HEAVY = {
    "distbelief": {"torch", "numpy", "matplotlib", "msgspec"},
    "distbelief.cli.main": {"torch", "numpy", "matplotlib", "scipy", "networkx"},
    "distbelief.serve.optimizer": {"matplotlib", "networkx", "torch._dynamo"},
    "distbelief.job.fit": {"matplotlib", "torch._dynamo"},
}


def test_importing_them_one_after_the_other_imports_nothing_heavy() -> None:
    shows = "print(json.dumps(sorted(sys.modules)))"
    program = "\n".join(["import sys, json", *(f"import {name}; {shows}" for name in HEAVY)])
    said = in_a_fresh_process(program).splitlines()
    for (module, heavy), modules in zip(HEAVY.items(), said, strict=True):
        assert heavy & {*json.loads(modules)} == set(), module


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_refused_before_anything_is_imported(platform: str) -> None:
    program = f"import sys; sys.platform = {platform!r}; import distbelief"
    said = in_a_fresh_process(program)
    assert f"ImportError: distbelief runs on Linux, and this is {platform}: " in said


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (module, name)
        for module in (distbelief, sandblaster)
        for name in module.__all__
        if not name.endswith("Error") and name not in {"Run", "Reason"}  # nobody makes these
    ],
)
def test_help_says_what_the_arguments_are(module: object, name: str) -> None:
    assert "\nArgs:\n" in (inspect.getdoc(getattr(module, name)) or "")


def test_the_fields_of_rules_and_schedules_are_all_explained() -> None:
    for each in (distbelief.Adam, distbelief.Cosine):
        described = (inspect.getdoc(each) or "").partition("\nArgs:\n")[2]
        for field in each.__struct_fields__:
            assert f"\n    {field}: " in f"\n{described}"


def completed(*words: str) -> list[str]:
    environment = {
        **os.environ,
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
        "_DISTBELIEF_COMPLETE": "complete_bash",
    }
    program = "from distbelief.cli.entry import main; import sys; sys.argv = ['distbelief']; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.split()


def test_the_tab_key_completes_commands_options_and_presets() -> None:
    assert completed("distbelief", "tr") == ["train"]
    assert completed("distbelief", "presets", "mu") == ["muloco"]
    assert completed("distbelief", "train", "--from-s") == ["--from-scratch"]
    assert completed("distbelief", "train", "jo") == []  # so that the shell completes files


def test_a_loop_is_logged_and_its_program_decides_what_is_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert any(
        isinstance(one, logging.NullHandler) for one in logging.getLogger("distbelief").handlers
    )
    net = nn.Linear(3, 2)
    server = Server(list(net.parameters()), rule=distbelief.SGD(learning_rate=0.1))
    optimizer = server.optimizer(monkeypatch, net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with caplog.at_level(logging.INFO, logger="distbelief"):
        optimizer.finish()
    assert caplog.messages == ["DownpourSGD has finished after 1 steps"]


def test_the_lines_of_a_jobs_log_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = RunLog(tmp_path / "supervisor.log", "supervisor", tell=print)
    log.warn("shard-0 has failed")
    with caplog.at_level(logging.INFO, logger="distbelief"):
        log.log("info", "shard-0 is back")
        log.log("debug", "a message")
    assert caplog.record_tuples == [
        ("distbelief.job", logging.WARNING, "supervisor: shard-0 has failed"),
        ("distbelief.job", logging.INFO, "supervisor: shard-0 is back"),
    ]
    assert "shard-0 is back" in (tmp_path / "supervisor.log").read_text()


def test_the_citation_has_the_version_and_the_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {project['version']}" in citation
    assert f"license: {project['license']}" in citation
