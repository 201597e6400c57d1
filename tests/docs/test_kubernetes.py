"""The manifests of docs/howto/kubernetes.md: valid, consistent, and with commands that exist."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from distbelief.cli.main import app
from tests.docs.pages import ROOT, blocks


yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

PAGE = ROOT / "docs" / "howto" / "kubernetes.md"
VERSION = "1.31"  # of Kubernetes


def manifests() -> list[Any]:
    texts = [block.text for block in blocks(PAGE) if block.kind == "yaml"]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text)]


def pods() -> list[Any]:
    return [
        each["spec"]["template"]["spec"]
        for each in manifests()
        if "template" in each.get("spec", {})
    ]


@pytest.mark.parametrize("manifest", manifests(), ids=lambda each: each["kind"])
def test_manifests_are_valid(manifest: Any) -> None:  # noqa: ANN401 -- YAML
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_a_wrong_manifest_would_be_found() -> None:
    job = next(each for each in manifests() if each["kind"] == "Job")
    job["spec"]["template"]["spec"]["restartPolicies"] = "OnFailure"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSION, strict=True)


def test_pods_mount_the_volumes_that_they_have() -> None:
    for pod in pods():
        volumes = {volume["name"] for volume in pod["volumes"]}
        containers = [*pod["initContainers"], *pod["containers"]]
        mounted = {mount["name"] for each in containers for mount in each["volumeMounts"]}
        assert mounted == volumes


def test_selectors_fit_the_pods() -> None:
    labels = {
        each["kind"]: each["spec"]["template"]["metadata"]["labels"]
        for each in manifests()
        if "template" in each.get("spec", {})
    }
    for each in manifests():
        if each["kind"] == "Service":
            assert each["spec"]["selector"] == labels["Job"]
        elif each["kind"] == "Deployment":
            assert each["spec"]["selector"]["matchLabels"] == labels["Deployment"]


def commands() -> Iterator[list[str]]:
    for pod in pods():
        for container in pod["containers"]:
            script = container["command"][-1].replace("\\\n", " ").replace("${resume:-}", "")
            yield shlex.split(re.search(r"exec distbelief (.+)", script)[1])  # type: ignore[index]


def test_the_commands_exist_with_their_options() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, *words in commands():
        options = {text for each in known[name].params for text in each.opts}
        assert {word for word in words if word.startswith("--")} <= options
    (_, address, *_), trainer = list(commands())[1], next(commands())
    service = next(each for each in manifests() if each["kind"] == "Service")
    port = service["spec"]["ports"][0]["port"]
    assert address == f"tcp://{service['metadata']['name']}:{port}"
    assert f"tcp://0.0.0.0:{port}" in trainer
