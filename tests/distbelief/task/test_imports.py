from pathlib import Path

import pytest

from distbelief.task.imports import installed_imports


def test_installed_modules_are_found_through_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "nets.py").write_text(
        "import os, msgspec.json\nfrom torch import nn\nfrom pack import data\n"
        "import nowhere.to.be.found\nimport distbelief.trainer\nraise SystemExit(3)\n"
    )
    (tmp_path / "pack" / "data.py").write_text(
        "from pack import nets, broken\nfrom rich.console import Console\ndef f(): import zmq\n"
    )
    (tmp_path / "pack" / "broken.py").write_text("import zmq\ndef net(:\n")
    found = installed_imports(["pack.nets", "nothing"], [str(tmp_path)])
    assert set(found) == {"msgspec.json", "torch", "torch.nn", "rich.console"}


@pytest.mark.parametrize("name", ["", "a..b", "sys", "zmq.no_such_module"])
def test_a_module_that_cannot_be_found_is_left_out(name: str, tmp_path: Path) -> None:
    assert installed_imports([name], [str(tmp_path)]) == ()
