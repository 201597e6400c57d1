"""The job file: what to train, how, on what, until when, and where it is kept.

TOML, strictly: a key nobody knows is a mistake, and so is a number where a quantity
with a unit belongs. Every message names the file, the table, the key, the value and
the mend. A job is plain data. It is written to the run directory as it ran
(`to_toml`), and handed to the role processes (`to_json`); both read back as equal jobs.

Rules:

* Tables that need no torch are checked first: a typing error is told at once.
* [model] initial, and text in `arguments` that begins with "./" or "../", are paths
  relative to the job file. [output] directory is relative to the current directory.
* Import paths are looked up in the job file's directory, then the current one.
* `--set TABLE.KEY=VALUE` replaces a value before anything is checked. VALUE is TOML;
  what cannot be that is text, so quotes are seldom needed.
"""

import datetime as dt
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Final, cast

import msgspec

from distbelief.errors import JobFileError
from distbelief.job.configuration import tables, toml_text
from distbelief.job.configuration.resolution import resolve
from distbelief.job.configuration.sections import Job
from distbelief.job.configuration.tables import Mistake


__all__ = ["Job", "job_from_json", "load_job", "parse_job"]

FILE_BYTES_MAX: Final = 1 << 20
"""A job file is written by hand; what is longer is some other file."""


def load_job(path: str | os.PathLike[str], *, overrides: Sequence[str] = ()) -> Job:
    """Return the job of the file at `path`.

    Args:
        path: A TOML file.
        overrides: "TABLE.KEY=VALUE", applied in this order.

    Raises:
        JobFileError: the file, a key or a value is wrong: which, and how to mend it.
    """
    text = _read_text(Path(path))
    return parse_job(text, path=path, overrides=overrides)


def parse_job(text: str, *, path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Job:
    """Return the job of this text, as if it stood in the file at `path`."""
    file = str(path)
    try:
        content = cast("dict[str, object]", tomllib.loads(text))
    except RecursionError:
        raise JobFileError(
            f"{file}: not valid TOML: brackets too deep: that is no job file"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise JobFileError(f"{file}: not valid TOML: {_shown(error, text)}") from None
    replaced = {_override(content, override): f"--set {override}" for override in overrides}
    return _read(content, file=file, overrides=replaced)


def job_from_json(text: bytes) -> Job:
    """Return the job that `Job.to_json` wrote.

    Raises:
        JobFileError: it is none.
    """
    try:
        content = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JobFileError(f"a job as JSON cannot be read: {error}") from None
    return _read(content, file="job", overrides={})


def _read(content: dict[str, object], *, file: str, overrides: Mapping[tables.Path, str]) -> Job:
    """Return the job, or say which file or override is at fault."""
    try:
        return resolve(content, file=file)
    except Mistake as mistake:
        culprits = [text for path, text in overrides.items() if _blames(mistake, path)]
        culprit = culprits[-1] if culprits else file
        raise JobFileError(f"{culprit}: {mistake}") from None


def _blames(mistake: Mistake, path: tables.Path) -> bool:
    """Does the mistake lie in what `--set` put at `path`?

    It does if it is there, or below. What a table that contains the place is blamed
    for may be due to what was put there: then the message names the key.
    """
    n_shared = min(len(path), len(mistake.path))
    if path[:n_shared] != mistake.path[:n_shared]:
        return False
    if n_shared == len(path):
        return True
    named = [f"'{path[n_shared - 1]}'", *path[n_shared:]]
    return any(name in mistake.text for name in named)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise JobFileError(f"{path} has more than {FILE_BYTES_MAX} bytes: that is no job file")
        return content.decode("utf-8-sig")  # some editors write a byte order mark
    except FileNotFoundError:
        raise JobFileError(_no_such_file(path)) from None
    except IsADirectoryError:
        raise JobFileError(
            f"{path} is a directory; name a job file in it, or go on with an earlier "
            f"run by --resume {path}"
        ) from None
    except UnicodeDecodeError as error:
        raise JobFileError(
            f"{path} is not UTF-8 text (byte {error.start}): that is no job file"
        ) from None
    except OSError as error:
        raise JobFileError(f"{path} cannot be read: {error.strerror}") from None


def _no_such_file(path: Path) -> str:
    parent = path.parent
    names = sorted(p.stem for p in parent.glob("*.toml")) if parent.is_dir() else []
    near = get_close_matches(path.stem, names, n=1)
    mend = f" Did you mean '{parent / near[0]}.toml'?" if near else ""
    return f"{path}: there is no such file.{mend}"


def _shown(error: tomllib.TOMLDecodeError, text: str) -> str:
    """Return what tomllib says, and the line it says it of."""
    match = re.search(r"line (\d+), column", str(error))
    lines = text.splitlines()
    number = int(match[1]) if match else len(lines)
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    said = str(error).replace("(at end of document)", f"(at the end, line {number})")
    return f"{said}\n    {number} | {line[:100]}"


def _override(content: dict[str, object], override: str) -> tables.Path:
    """Replace one value of `content`; return where it stands."""
    place, equals, text = override.partition("=")
    path = tuple(key.strip() for key in place.split("."))
    if not equals or not all(path):
        raise JobFileError(
            f"--set {override}: write TABLE.KEY=VALUE, for example algorithm.n_push=5"
        )
    table = content
    for index, key in enumerate(path[:-1], start=1):
        below = table.setdefault(key, {})
        if not isinstance(below, dict):
            raise JobFileError(
                f"--set {override}: {'.'.join(path[:index])} is "
                f"{toml_text.excerpt(below)}, not a table"
            )
        table = below
    table[path[-1]] = _value(text.strip())
    return path


def _value(text: str) -> object:
    """Return the TOML value of this text, or the text itself if it is none."""
    try:
        value = cast("object", tomllib.loads(f"value = {text}")["value"])
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    dates = dt.date | dt.time  # a datetime is a date
    return text if isinstance(value, dates) else value
