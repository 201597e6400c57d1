"""From the tables of a job file, as read, to a checked and resolved `Job`.

Tables that need no torch are checked first: a typing error in them is told at once.
What is wrong raises `Mistake`, which knows its place in the file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from distbelief.errors import JobError, JobFileError
from distbelief.job.configuration import algorithms, tables, toml_text
from distbelief.job.configuration.sections import (
    QUANTITIES,
    ClusterTable,
    DataTables,
    EvaluationTable,
    Job,
    OutputTable,
    SourceTable,
    StopTable,
)
from distbelief.job.configuration.tables import Mistake


if TYPE_CHECKING:  # it imports torch
    from distbelief.runtime.task.task import DataSpec, ModelSpec


_TABLES: Final = ("model", "data", "algorithm", "cluster", "evaluation", "stop", "output", "source")


def resolve(content: dict[str, object], *, file: str) -> Job:
    """Return the job of these tables, read from `file`.

    Raises:
        Mistake: the first one found.
    """
    tables.check_known(content, ("name", *_TABLES), ())
    given = {name: tables.as_table(content.get(name, {}), (name,)) for name in _TABLES}
    for name in ("model", "data", "algorithm"):
        if name not in content:
            raise Mistake((name,), f"there is no table [{name}]: add one")
    source = _source(given["source"], file=file)
    cluster = _cluster(given["cluster"], base=Path(source.file).parent)
    evaluation = _decode(given["evaluation"], EvaluationTable, "evaluation")
    stop = _stop(given["stop"])
    output = _output(given["output"], file=source.file)
    name = _name(content, output)
    point = _algorithm(given["algorithm"])
    _check_end(stop, point, is_there="stop" in content)
    # From here on torch is needed.
    base = Path(source.file).parent
    job = Job(
        model=_model(given["model"], base=base),
        data=_data(given["data"], base=base),
        algorithm_name=point.name,
        algorithm=tables.decode(
            {key: value for key, value in given["algorithm"].items() if key != "name"},
            _loaded(point).config,
            path=("algorithm",),
        ),
        cluster=cluster,
        evaluation=evaluation,
        stop=stop,
        output=output,
        name=name,
        source=source.file,
        import_paths=source.import_paths,
    )
    _check_together(job)
    return job


def _decode(table: dict[str, object], struct: type[tables.S], name: str) -> tables.S:
    return tables.decode(table, struct, path=(name,), quantities=QUANTITIES.get(name))


def _source(table: dict[str, object], *, file: str) -> SourceTable:
    if table:
        return tables.decode(table, SourceTable, path=("source",))
    here = Path.cwd()
    return SourceTable(file=file, import_paths=(str((here / file).parent), str(here)))


def _cluster(table: dict[str, object], *, base: Path) -> ClusterTable:
    cluster = _decode(table, ClusterTable, "cluster")
    if cluster.plan is not None:
        cluster = msgspec.structs.replace(cluster, plan=_from(base, cluster.plan))
    if cluster.machines.endswith(".toml"):
        found = _from(base, cluster.machines)
        cluster = msgspec.structs.replace(cluster, machines=found)
    return cluster


def _stop(table: dict[str, object]) -> StopTable:
    """The key `seconds` names its unit, so it alone may also be a bare number."""
    seconds = table.get("seconds")
    if isinstance(seconds, int | float) and not isinstance(seconds, bool):
        table = table | {"seconds": f"{seconds!r} s"}
    return _decode(table, StopTable, "stop")


def _check_end(stop: StopTable, point: EntryPoint, *, is_there: bool) -> None:
    """Refuse a job without end."""
    if not stop.is_empty or algorithms.ends_by_itself(point):
        return
    if not is_there:
        raise Mistake(("stop",), "there is no table [stop]: add one")
    raise Mistake(
        ("stop",),
        "[stop] has no rule, so the job would never end: add epochs = 1, or another of "
        f"{', '.join(stop.__struct_fields__)}",
    )


def _output(table: dict[str, object], *, file: str) -> OutputTable:
    usual = {"directory": f"runs/{Path(file).stem}"}
    output = _decode(usual | table, OutputTable, "output")
    if not output.directory.strip():
        raise Mistake(
            ("output", "directory"),
            '[output] directory = "": name one, for example '
            f'"{usual["directory"]}", or leave it out',
        )
    return output


def _name(content: dict[str, object], output: OutputTable) -> str:
    name = content.get("name", Path(output.directory).name or "job")
    if not isinstance(name, str) or not name.strip():
        raise Mistake(("name",), f"name = {toml_text.excerpt(name)}: wants text in quotes")
    return name


def _algorithm(table: dict[str, object]) -> EntryPoint:
    path = ("algorithm", "name")
    if "name" not in table:
        raise Mistake(path, "[algorithm] lacks the key 'name': give it text, such as \"downpour\"")
    name = table["name"]
    try:
        return algorithms.find(name)
    except JobFileError as error:
        text = f"[algorithm] name = {toml_text.excerpt(name)} {error}"
        raise Mistake(path, text) from None


def _loaded(point: EntryPoint) -> algorithms.Algorithm:
    try:
        return algorithms.load(point)
    except JobFileError as error:
        raise Mistake(("algorithm", "name"), f"[algorithm] {error}") from error


def _model(table: dict[str, object], *, base: Path) -> ModelSpec:
    from distbelief.runtime.task.task import ModelSpec  # noqa: PLC0415 -- torch

    model = tables.decode(_grounded(table, base), ModelSpec, path=("model",))
    _check_plain(model.arguments, ("model", "arguments"))
    if model.initial.endswith(".safetensors"):
        return msgspec.structs.replace(model, initial=_from(base, model.initial))
    return model


def _data(table: dict[str, object], *, base: Path) -> DataTables:
    from distbelief.runtime.task.task import DataSpec  # noqa: PLC0415 -- torch

    tables.check_known(table, ("train", "test"), ("data",))
    if "train" not in table:
        raise Mistake(("data",), "there is no table [data.train]: add one")
    specs: dict[str, DataSpec] = {}
    for name, value in table.items():
        path = ("data", name)
        part = _grounded(tables.as_table(value, path), base)
        specs[name] = tables.decode(part, DataSpec, path=path)
        _check_plain(specs[name].arguments, (*path, "arguments"))
    return DataTables(train=specs["train"], test=specs.get("test"))


def _check_together(job: Job) -> None:
    """Refuse tables that are right one by one, but not together."""
    if job.data.test is None and job.stop.accuracy is not None:
        raise Mistake(
            ("stop", "accuracy"),
            f"[stop] accuracy = {job.stop.accuracy:g} needs held-out data: add a table [data.test]",
        )
    try:
        algorithms.check_cluster(job)
    except JobError as error:
        raise Mistake(("cluster",), str(error)) from None


def _check_plain(value: object, path: tables.Path) -> None:
    """Refuse what role processes could not be told: dates, NaN, huge numbers."""
    match value:
        case Mapping():
            for key, item in value.items():
                _check_plain(item, (*path, str(key)))
        case list():
            for item in value:
                _check_plain(item, path)
        case bool() | str():
            pass
        case int() if -(2**63) <= value < 2**63:
            pass
        case float() if math.isfinite(value):
            pass
        case _:
            raise Mistake(
                path,
                f"{tables.header(path[:-1])} {path[-1]} = {toml_text.excerpt(value)}: "
                "wants text, a finite number (64 bits), true or false, a list, a table",
            )


def _grounded(table: dict[str, object], base: Path) -> dict[str, object]:
    """Return the table with the relative paths among its arguments made absolute."""
    arguments = table.get("arguments")
    if not isinstance(arguments, dict):
        return table
    return table | {"arguments": _ground(arguments, base)}


def _ground(value: object, base: Path) -> object:
    match value:
        case str() if value.startswith(("./", "../")):
            return _from(base, value)
        case list():
            return [_ground(item, base) for item in value]
        case dict():
            return {key: _ground(item, base) for key, item in value.items()}
        case _:
            return value


def _from(base: Path, path: str) -> str:
    return os.path.normpath(Path.cwd() / base / path)
