"""The job file: reads it, applies overrides, resolves paths, and checks it.

TOML, strictly: an unknown key is an error, and so is a number where a quantity with a unit belongs.
Each error names the file, the table, the key, the value and the fix. A job is plain data: it is
stored in the run directory (`to_toml`) and sent to the role processes (`to_json`).

* [model] initial, and text in `arguments` that begins with "./" or "../", are paths relative to the
  job file. [output] directory is relative to the current directory.
* Import paths are looked up in the job file's directory, then the current one.
* `--set TABLE.KEY=VALUE` replaces a value before checks. VALUE is TOML, or else plain text.
"""

from __future__ import annotations

import datetime as dt
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import msgspec
import numpy as np

from distbelief.config import algorithms, job as jobs, presets, tables, toml
from distbelief.config.job import Job
from distbelief.config.tables import TableError
from distbelief.core.errors import JobError, JobFileError
from distbelief.task.imports import places


__all__ = ["Job", "job_from_json", "job_of", "load_job", "parse_job", "plain"]


if TYPE_CHECKING:  # it imports torch
    from distbelief.task.task import DataSpec, ModelSpec


_TABLES: Final = ("model", "data", "algorithm", "cluster", "evaluation", "stop", "output", "source")


def resolve(content: dict[str, object], *, file: str) -> Job:
    """Return the job of these tables, read from `file`."""
    tables.check_known(content, ("name", *_TABLES), ())
    given = {name: tables.as_table(content.get(name, {}), (name,)) for name in _TABLES}
    for needed in ("model", "data", "algorithm"):
        if needed not in content:
            raise _no_table(needed)
    here = Path.cwd()
    origin = {
        "file": file,
        "import_paths": [*dict.fromkeys([str((here / file).parent), str(here)])],
    }
    source = tables.decode(given["source"] or origin, jobs.SourceTable, path=("source",))
    base = Path(source.file).parent
    cluster = _cluster(given["cluster"], base=base)
    evaluation = tables.decode(given["evaluation"], jobs.EvaluationTable, path=("evaluation",))
    stop = _stop(given["stop"])
    usual = {"directory": f"runs/{Path(source.file).stem}"}
    output = tables.decode(usual | given["output"], jobs.OutputTable, path=("output",))
    name: object = content.get("name", Path(output.directory).name or "job")
    if not isinstance(name, str) or not name.strip():
        raise TableError(("name",), f"name = {toml.excerpt(name)}: wants text in quotes")
    if not name.isprintable():
        raise TableError(("name",), f"name = {name!a:.200}: wants no control characters")
    try:
        point = algorithms.find(given["algorithm"].get("name"))
        algorithm = algorithms.load(point)
    except JobFileError as error:
        raise TableError(("algorithm", "name"), f"[algorithm] {error}") from error
    # What follows imports torch; the tables above are checked first, so their errors come fast.
    settings = {key: value for key, value in given["algorithm"].items() if key != "name"}
    given_keys = settings
    if "exchange" in algorithm.config.__struct_fields__:
        settings = _expanded(settings)
    try:
        settings = tables.with_whole_groups(settings)
        if isinstance(settings.get("loss"), dict):
            settings |= {"loss": _loss(settings["loss"])}
        decoded = tables.decode(settings, algorithm.config, path=("algorithm",))
    except TableError as error:
        raise _with_preset(error, given_keys) from None
    if stop.is_empty and not algorithm.facts(decoded).ends_by_itself:
        if "stop" not in content:
            raise _no_table("stop")
        raise TableError(
            ("stop",),
            "[stop] is empty, so the job would never end: add epochs = 1, or another of "
            f"{', '.join(stop.__struct_fields__)}",
        )
    job = Job(
        model=_model(given["model"], base=base),
        data=_data(given["data"], base=base),
        algorithm_name=point.name,
        algorithm=decoded,
        cluster=cluster,
        evaluation=evaluation,
        stop=stop,
        output=output,
        name=name,
        source=source.file,
        import_paths=source.import_paths,
    )
    _check_sizes(content, ())
    _check_held_out(job)
    try:
        return algorithms.settled(job)
    except JobError as error:
        raise _with_preset(TableError(("cluster",), str(error)), given_keys) from None


def _check_held_out(job: Job) -> None:
    """Raise TableError for a key that needs evaluations where there are none."""
    accuracy, patience, keeps_best = job.stop.accuracy, job.stop.patience, job.output.keep == "best"
    needs = {
        ("stop", "accuracy"): accuracy is not None and f"accuracy = {accuracy:g}",
        ("stop", "patience"): patience is not None and f"patience = {patience}",
        ("output", "keep"): keeps_best and 'keep = "best"',
    }
    for path, key in needs.items():
        if key and job.data.test is None:
            raise TableError(
                path, f"[{path[0]}] {key} needs held-out data: add a table [data.test]"
            )
    rule = algorithms.facts_of(job).rule
    if job.evaluation.averaged and (rule is None or rule.ema is None):
        raise TableError(
            ("evaluation", "averaged"),
            "[evaluation] averaged is true, and no average is kept: give the rule in [algorithm] "
            "ema = 0.999, or leave averaged out",
        )
    if keeps_best and job.cluster.is_split:
        raise TableError(
            ("output", "keep"),
            '[output] keep = "best" needs an evaluator that holds the whole model, and '
            "[cluster] partitions or plan split it: leave keep out, and end the job near "
            "its best by [stop] patience",
        )


INTEGER_MAX: Final = 2**53  # larger ones are no exact floats
TEXT_MAX: Final = 4096  # characters; no path may be longer


def _check_sizes(value: object, path: tables.Path) -> None:
    """Raise TableError for a number or a text that no part of the program has room for."""
    where = f"{tables.header(path[:-1])} {path[-1]}" if path else ""
    match value:
        case dict():
            for key, item in value.items():
                if key != "arguments":  # the user's own
                    _check_sizes(item, (*path, str(key)))
        case list():
            for item in value:
                _check_sizes(item, path)
        case int() if abs(value) > INTEGER_MAX:
            raise TableError(path, f"{where} = {toml.excerpt(value)}: wants at most {INTEGER_MAX}")
        case str() if len(value) > TEXT_MAX:
            raise TableError(
                path,
                f"{where} = {toml.excerpt(value)}: has {len(value)} characters, wants at most "
                f"{TEXT_MAX}",
            )
        case str() if not value.isprintable():
            raise TableError(path, f"{where} = {toml.excerpt(value)}: wants no control characters")


def _loss(table: object) -> str:
    from distbelief.task.losses import text_of  # noqa: PLC0415 -- torch

    path = ("algorithm", "loss")
    try:
        return text_of(tables.as_table(table, path))
    except JobError as error:
        raise TableError(path, str(error)) from None


def _expanded(algorithm: dict[str, object]) -> dict[str, object]:
    path = ("algorithm", "preset")
    exchange = algorithm.get("exchange")
    if isinstance(exchange, dict) and "preset" in exchange:
        raise TableError(("algorithm", "exchange", "preset"), "'preset' belongs into [algorithm].")
    try:
        settings = presets.expand(algorithm)
    except JobFileError as error:
        raise TableError(path, f"[algorithm] {error}") from error
    if "rule" not in settings:
        raise TableError(
            ("algorithm",),
            "[algorithm] has neither rule nor preset: give "
            'rule = { name = "adagrad", learning_rate = 0.02 }, or preset = "downpour"',
        )
    return settings


def _with_preset(error: TableError, algorithm: Mapping[str, object]) -> TableError:
    # A key that the user did not write must not stand in an error without a word on its origin.
    keys = sorted(presets.filled(algorithm) - {"exchange"})
    culprits = error.text.partition(" It knows ")[0]  # `key = ` stands in a way out only
    own = [key for key in keys if re.search(rf"(?<!['\w]){key}\b(?! of the| =)", culprits)]
    if not own:
        return error
    preset = toml.excerpt(algorithm["preset"])
    return TableError(error.path, f"{error.text} ({', '.join(own)}: from preset = {preset})")


def _no_table(name: str) -> TableError:
    return TableError((name.partition(".")[0],), f"there is no table [{name}]: add one")


def _cluster(table: dict[str, object], *, base: Path) -> jobs.ClusterTable:
    cluster = tables.decode(table, jobs.ClusterTable, path=("cluster",))
    plan, machines = cluster.plan, cluster.machines
    return msgspec.structs.replace(
        cluster,
        plan=None if plan is None else _from(base, plan),
        machines=_from(base, machines) if machines.endswith(".toml") else machines,
    )


def _stop(table: dict[str, object]) -> jobs.StopTable:
    # The key names its unit, so a bare number is allowed too.
    seconds = table.get("seconds")
    if isinstance(seconds, int | float) and not isinstance(seconds, bool):
        table = table | {"seconds": f"{seconds!r} s"}
    return tables.decode(table, jobs.StopTable, path=("stop",))


def _model(table: dict[str, object], *, base: Path) -> ModelSpec:
    from distbelief.task.initializers import InitialFile  # noqa: PLC0415 -- torch
    from distbelief.task.task import ModelSpec  # noqa: PLC0415 -- torch

    model = tables.decode(_with_arguments(table, ("model",), base), ModelSpec, path=("model",))
    match model.initial:
        case InitialFile(file=file):
            initial = msgspec.structs.replace(model.initial, file=_from(base, file))
            return msgspec.structs.replace(model, initial=initial)
        case str(file) if file.endswith(".safetensors"):
            return msgspec.structs.replace(model, initial=_from(base, file))
        case _:
            return model


def _data(table: dict[str, object], *, base: Path) -> jobs.DataTables:
    from distbelief.task.task import DataSpec  # noqa: PLC0415 -- torch

    tables.check_known(table, ("train", "test"), ("data",))
    if "train" not in table:
        raise _no_table("data.train")
    specs: dict[str, DataSpec] = {}
    for name, value in table.items():
        path = ("data", name)
        part = _with_arguments(tables.as_table(value, path), path, base)
        specs[name] = tables.decode(part, DataSpec, path=path)
    return jobs.DataTables(train=specs["train"], test=specs.get("test"))


def _with_arguments(table: dict[str, object], path: tables.Path, base: Path) -> dict[str, object]:
    if "arguments" not in table:
        return table
    return table | {"arguments": _argument(table["arguments"], (*path, "arguments"), base)}


def _argument(value: object, path: tables.Path, base: Path) -> object:
    # Paths start at the job file. Dates, NaN and huge integers cannot be sent to role processes.
    match value:
        case Mapping():
            return {k: _argument(item, (*path, str(k)), base) for k, item in value.items()}
        case list():
            return [_argument(item, path, base) for item in value]
        case str() if value.startswith(("./", "../")):
            return _from(base, value)
        case bool() | str():
            return value
        case int() if -(2**63) <= value < 2**63:
            return value
        case float() if math.isfinite(value):
            return value
        case _:
            raise TableError(
                path,
                f"{tables.header(path[:-1])} {path[-1]} = {toml.excerpt(value)}: "
                "wants text, a finite number (64 bits), true or false, a list, a table",
            )


def _from(base: Path, path: str) -> str:
    return os.path.normpath(Path.cwd() / base / path)


FILE_BYTES_MAX: Final = 1 << 20  # job files are written by hand: a longer one is another file


Overrides = Sequence[str] | Mapping[str, object]
"""Settings of single keys: ["stop.epochs=2"], as of `--set`, or {"stop.epochs": 2}."""


def load_job(
    path: str | os.PathLike[str], *, overrides: Overrides = (), swept: Sequence[str] = ()
) -> Job:
    """Return the job of a file, with these settings: of `--set`, and of a sweep."""
    if not isinstance(cast("object", path), str | os.PathLike):
        shown = " ".join(repr(path).split())[:60]
        raise JobFileError(f"the job is {shown}: give the path of a job file")
    text = _read_text(Path(path))
    if Path(path).with_name("snapshots").is_dir():
        try:
            parse_job(text, path=path)
        except JobFileError as error:
            way = (
                "The run's own file: use the version that wrote it, restore it, or begin a new run"
            )
            raise JobFileError(f"{error}. {way}") from None
    return parse_job(text, path=path, overrides=overrides, swept=swept)


def parse_job(
    text: str, *, path: str | os.PathLike[str], overrides: Overrides = (), swept: Sequence[str] = ()
) -> Job:
    """Return the job of this text, as if it were the file at `path`."""
    file = str(path)
    try:
        content = cast("dict[str, object]", tomllib.loads(text))
    except RecursionError:
        raise JobFileError(
            f"{file}: not valid TOML: brackets too deep: that is no job file"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise JobFileError(f"{file}: not valid TOML: {_shown(error, text)}") from None
    replaced: dict[tables.Path, str] = {}
    if isinstance(overrides, Mapping):
        for place, value in overrides.items():
            said = f"overrides, {place!r}"
            replaced[_put(content, place, plain(value), said)] = said
        overrides = ()
    settings = [("--set", one) for one in overrides] + [("--sweep", one) for one in swept]
    replaced |= {_override(content, one, flag): f"{flag} {one}" for flag, one in settings}
    try:
        return resolve(content, file=file)
    except TableError as error:
        culprits = [text for path, text in replaced.items() if _blames(error, path)]
        raise JobFileError(f"{[file, *culprits][-1]}: {error}") from None


def job_of(
    table: Mapping[str, object], *, user: str, overrides: Overrides = (), swept: Sequence[str] = ()
) -> Job:
    """Return the job of tables as Python has them: numpy's numbers, paths and rules, too."""
    source = {"source": {"file": user, "import_paths": places()}}
    text = toml.write(cast("toml.Table", plain(source | dict(table))))
    return parse_job(text, path=user, overrides=overrides, swept=swept)


def plain(value: object) -> object:
    """Return a value as a job file has it: "np.float64(0.5)" would be none of its numbers."""
    match value:
        case np.generic():
            return value.item()
        case os.PathLike():
            return os.fspath(value)
        case msgspec.Struct():
            return tables.encode(value)
        case Mapping():
            return {key: plain(one) for key, one in value.items()}
        case list() | tuple():
            return [plain(one) for one in value]
        case _:
            return value


def job_from_json(text: bytes) -> Job:
    try:
        return resolve(msgspec.json.decode(text, type=dict[str, object]), file="job")
    except (TableError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JobFileError(f"a job as JSON cannot be read: {error}") from None


def _blames(error: TableError, path: tables.Path) -> bool:
    # Whether the error lies in what `--set` or `--sweep` put at `path`: it is there, or below. An
    # error of a table that contains the place may come from it as well: then the message names the
    # key.
    n_shared = min(len(path), len(error.path))
    if path[:n_shared] != error.path[:n_shared]:
        return False
    if n_shared == len(path):
        return True
    named = [f"'{path[n_shared - 1]}'", *path[n_shared:]]
    return any(name in error.text for name in named)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise JobFileError(f"{path} has more than {FILE_BYTES_MAX} bytes: that is no job file")
        return content.decode("utf-8-sig")  # some editors write a byte order mark
    except FileNotFoundError:
        names = [file.stem for file in path.parent.glob("*.toml")]
        near = get_close_matches(path.stem, names, n=1)
        hint = f" Did you mean '{path.parent / near[0]}.toml'?" if near else ""
        raise JobFileError(f"{path}: there is no such file.{hint}") from None
    except IsADirectoryError:
        raise JobFileError(
            f"{path} is a directory: name a job file in it, or resume a run with --resume {path}"
        ) from None
    except UnicodeDecodeError as error:
        raise JobFileError(
            f"{path} is not UTF-8 text (byte {error.start}): that is no job file"
        ) from None
    except OSError as error:
        raise JobFileError(f"{path} cannot be read: {error.strerror}") from None


def _shown(error: tomllib.TOMLDecodeError, text: str) -> str:
    match = re.search(r"line (\d+), column", str(error))
    lines = text.splitlines()
    number = int(match[1]) if match else len(lines)
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    text = str(error).replace("(at end of document)", f"(at the end, line {number})")
    return f"{text}\n    {number} | {line[:100]}"


def _override(content: dict[str, object], override: str, flag: str) -> tables.Path:
    place, equals, text = override.partition("=")
    if not equals:
        place = ""
    return _put(content, place, _value(text.strip()), f"{flag} {override}")


def _put(content: dict[str, object], place: str, value: object, said: str) -> tables.Path:
    """Set one key of the tables; `place` is "table.key", and `said` is for messages."""
    path = tuple(key.strip() for key in place.split("."))
    if not all(path):
        form = "TABLE.KEY=VALUE, for example algorithm.n_push=5"
        raise JobFileError(f"{said}: write {form}")
    table = content
    for index, key in enumerate(path[:-1], start=1):
        below = table.setdefault(key, {})
        if not isinstance(below, dict):
            raise JobFileError(
                f"{said}: {'.'.join(path[:index])} is {toml.excerpt(below)}, not a table"
            )
        table = below
    table[path[-1]] = value
    return path


def _value(text: str) -> object:
    try:
        value = cast("object", tomllib.loads(f"value = {text}")["value"])
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    dates = dt.date | dt.time  # a datetime is a date
    return text if isinstance(value, dates) else value
