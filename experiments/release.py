"""Checks what `make release` has built: the wheel's files, its metadata, and the version's heading.

python experiments/release.py dist [--version]
"""

import argparse
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path


ROOT = Path(__file__).parents[1]
IN_WHEEL = {
    "distbelief/py.typed",
    "sandblaster/py.typed",
    "distbelief/cli/demo_task.py",
    *(f"distbelief/dashboard/page/{name}" for name in ("index.html", "page.js", "page.css")),
    *(f"distbelief/dashboard/page/{name}" for name in ("uplot.js", "uplot.css", "LICENSE.uplot")),
}
IN_SOURCES = {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", "tests/conftest.py"}
METADATA = {"Name", "Version", "Summary", "License-Expression", "Requires-Python", "Author"}


def problems(folder: Path) -> tuple[str, list[str]]:
    """Return the version, and what is wrong with the one wheel and the one archive of sources."""
    wheels, archives = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if (len(wheels), len(archives)) != (1, 1):
        return "", [f"{folder} has {len(wheels)} wheels and {len(archives)} archives: build again"]
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = set(wheel.namelist())
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(wheel.read(about).decode())
    with tarfile.open(archives[0]) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    version = str(metadata["Version"])
    strangers = {name.split("/")[0] for name in names} - {"distbelief", "sandblaster"}
    found = [f"the wheel lacks {name}" for name in sorted(IN_WHEEL - names)]
    found += [f"the sources lack {name}" for name in sorted(IN_SOURCES - sources)]
    found += [f"the wheel has {s}" for s in sorted(strangers) if not s.endswith(".dist-info")]
    found += [f"the metadata lack {name}" for name in sorted(METADATA - set(metadata))]
    if f"## [{version}]" not in (ROOT / "CHANGELOG.md").read_text():
        found.append(f"CHANGELOG.md has no heading ## [{version}]")
    return version, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="what the build has written: dist")
    parser.add_argument("--version", action="store_true", help="print the version, check nothing")
    arguments = parser.parse_args()
    version, found = problems(arguments.folder)
    if arguments.version and version:
        print(version)
    elif found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
