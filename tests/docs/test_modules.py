"""Pages that name modules name modules that exist, and what is in them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import distbelief
from tests.docs.pages import ROOT


SECTIONS = {  # headings of CONTRIBUTING.md, and where the modules below them are
    "`distbelief/job/`, `distbelief/simulation/` and `distbelief/plans/`": "distbelief",
    "`distbelief/parameter_server/`": "distbelief/parameter_server",
    "`distbelief/worker/` and `distbelief/supervisor/`": "distbelief",
    "`sandblaster/`": "sandblaster",
}


def exists(path: str) -> bool:
    return (ROOT / path).exists() or (ROOT / f"{path}.py").exists()


def rows(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]


def section(text: str, heading: str) -> str:
    return text.partition(f"\n### {heading}\n")[2].partition("\n#")[0]


def test_the_rooms_are_where_the_first_table_says() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## The rooms")[2]
    for first, second in rows(text.partition("\n###")[0]):
        places = re.findall(r"`([\w/.]+)`", first)
        folders = [str(Path("distbelief") / p.removeprefix("distbelief/")) for p in places]
        folders = [p if exists(p) else p.removeprefix("distbelief/") for p in folders]
        assert all(map(exists, folders)), first
        for name in re.findall(r"`([a-z_]+/?)`", second):
            assert any(exists(f"{folder}/{name}") for folder in folders), f"{first}: {name}"


def test_every_room_of_the_library_has_a_row() -> None:
    rooms = {path.parent.name for path in (ROOT / "distbelief").glob("*/__init__.py")}
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("\n### ")[0]
    assert sorted(re.findall(r"^\| `distbelief/(\w+)/`", table, re.MULTILINE)) == sorted(rooms)
    assert not rooms & {*distbelief.__all__}  # a package would hide the public name


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_modules_are_where_the_other_tables_say(heading: str) -> None:
    for first, _ in rows(section((ROOT / "CONTRIBUTING.md").read_text(), heading)):
        folder = SECTIONS[heading]
        for name in re.findall(r"`([\w/]+)`", first):
            if "/" in name.strip("/"):
                folder = f"{SECTIONS[heading]}/{Path(name).parent}"
                name = Path(name).name  # noqa: PLW2901 -- later names are beside it
            assert exists(f"{folder}/{name}"), f"{folder}/{name}"


def contents(path: Path) -> Iterator[str]:
    """Yield what a module defines: "name", "Class", "Class.member"."""
    for node in ast.parse(path.read_text()).body:
        yield from names(node)
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            yield from (f"{name}.{one}" for name in names(node) for one in names(member))


def names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case _:
            return []


def test_behaviours_are_decided_where_the_table_says() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where a behaviour is decided")[2]
    for row in re.findall(r"^\| [^|*]+ \| (`.*) \|$", text.partition("\n## ")[0], re.MULTILINE):
        known: set[str] = set()
        for name in re.findall(r"`([^`]+)`", row):
            if name.endswith(".py"):
                path = ROOT / (name if name.startswith("sandblaster/") else f"distbelief/{name}")
                known = {*contents(path)}
            else:
                assert name in known, row


def named_modules() -> Iterator[Path]:
    """Yield the modules and folders that the tables of CONTRIBUTING.md name."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for first, second in rows(text.partition("## The rooms")[2].partition("\n###")[0]):
        room = Path(first.strip("`/ "))
        # A room that is described below has a table of its own, folder by folder.
        folders = "[a-z_]+" if "see below" in second else "[a-z_]+/?"
        yield from (room / name.strip("/") for name in re.findall(f"`({folders})`", second))
    for heading, folder in SECTIONS.items():
        for first, _ in rows(section(text, heading)):
            place = Path(folder)
            for name in re.findall(r"`([\w/]+)`", first):
                place = Path(folder, name).parent if "/" in name.strip("/") else place
                yield place / Path(name).name


def test_every_module_of_the_library_has_a_place_in_a_table() -> None:
    named = {*named_modules()}
    for package in ("distbelief", "sandblaster"):
        for path in (ROOT / package).rglob("[!_]*.py"):
            module = path.relative_to(ROOT).with_suffix("")
            assert named & {module, *module.parents}, module


def test_the_modules_of_the_papers_page_exist() -> None:
    text = (ROOT / "docs" / "explanation" / "papers.md").read_text()
    for name in re.findall(r"`((?:distbelief|sandblaster)\.[\w.]+)`", text):
        assert exists(name.replace(".", "/")), name


def test_files_named_under_where_to_add_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to add")[2]
    text = text.partition("\n## ")[0]
    for name in re.findall(r"`([\w/]+\.(?:py|toml))`", text):
        tried = [name, f"distbelief/{name}"]
        beside = [f"distbelief/{d}/{name}" for d in ("job/hosts", "parameter_server")]
        beside += [f"distbelief/parameter_server/client/{name}", f"sandblaster/optimizers/{name}"]
        assert any(map(exists, tried + beside)), name
