"""MkDocs hook: puts a table of every job-file key into reference/job-file.md.

Type, bounds and default come from the msgspec structs that read a job file; unit and
effect from reference/job_keys.toml. A key without an entry there, or an entry without
a key, fails the build and the test `tests/docs/test_reference.py`.
"""

import itertools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec
from msgspec import inspect

from distbelief.config.job import (
    ClusterTable,
    Elastic,
    EvaluationTable,
    Fit,
    OutputTable,
    SourceTable,
    StopTable,
)
from distbelief.config.tables import units_of
from distbelief.parameter_server.codecs import Codec
from distbelief.parameter_server.codecs.threshold import Adaptive
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.rules import TorchRule, UpdateRule
from distbelief.parameter_server.schedules import Schedule
from distbelief.task.initializers import InitialFile
from distbelief.task.task import DataSpec, ModelSpec
from distbelief.worker.downpour_settings import DownpourSettings, LockFree
from sandblaster.settings import SandblasterSettings, WarmStart


MARKER = "<!-- every job-file key -->"
EFFECTS = Path(__file__).parent.parent / "reference" / "job_keys.toml"


def tag_of(struct: type[msgspec.Struct]) -> str:
    """Return the name by which a job file chooses this struct."""
    return str(struct.__struct_config__.tag)


_RULES = [rule for rule in get_args(UpdateRule) if not issubclass(rule, TorchRule)]
TABLES: dict[str, type[msgspec.Struct]] = {
    "model": ModelSpec,
    "model.initial": InitialFile,
    "data.train": DataSpec,
    "data.test": DataSpec,
    "algorithm (downpour)": DownpourSettings,
    "algorithm.lockfree": LockFree,
    "algorithm.exchange": ExchangePolicy,
    **{f"codec ({tag_of(each)})": each for each in get_args(Codec)},
    "algorithm.exchange.push.adaptive": Adaptive,
    "algorithm.exchange.round": Round,
    "algorithm (sandblaster)": SandblasterSettings,
    "algorithm.warm_start": WarmStart,
    **{f"rule ({tag_of(rule)})": rule for rule in _RULES},
    "rule (AdamW, NAdam, ...)": TorchRule,
    **{f"schedule ({tag_of(each)})": each for each in get_args(Schedule)},
    "cluster": ClusterTable,
    "cluster.partitions": Fit,
    "cluster.replicas": Elastic,
    "evaluation": EvaluationTable,
    "stop": StopTable,
    "output": OutputTable,
    "source": SourceTable,
}

_WORDS: dict[type[inspect.Type], str] = {
    inspect.IntType: "whole number",
    inspect.FloatType: "number",
    inspect.StrType: "text",
    inspect.BoolType: "true or false",
    inspect.DictType: "table",
    inspect.StructType: "table",
}


@dataclass(frozen=True)
class Key:
    """One key of a job file, as the structs and job_keys.toml describe it."""

    table: str
    name: str
    type: str
    default: str
    unit: str
    effect: str


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace the marker by the tables (called by MkDocs for each page)."""
    if MARKER not in markdown:
        return markdown
    return markdown.replace(MARKER, "\n".join(_lines()))


def keys() -> Iterator[Key]:
    """Yield every key of every table, in the order of the page.

    Raises:
        ValueError: job_keys.toml lacks a key, or has one that no struct has.
    """
    effects = tomllib.loads(EFFECTS.read_text())
    for table, struct in TABLES.items():
        entries = dict(effects.pop(table, {}))
        entries.pop("about", None)
        info = inspect.type_info(struct)
        assert isinstance(info, inspect.StructType)
        fields = {field.encode_name: field for field in info.fields}
        if entries.keys() != fields.keys():
            wrong = sorted(entries.keys() ^ fields.keys())
            raise ValueError(f"job_keys.toml: [{table}] lacks, or has too much: {wrong}")
        for name, entry in entries.items():
            yield _key(table, fields[name], entry)
    if effects:
        raise ValueError(f"job_keys.toml: no table {sorted(effects)}")


def _key(table: str, field: inspect.Field, entry: str | dict[str, str]) -> Key:
    """Return a key; its entry is the effect alone, or {effect, default, unit}."""
    default = "" if field.required else _default(field)
    fields = {"effect": entry} if isinstance(entry, str) else entry
    dimension = units_of(TABLES[table]).get(field.encode_name)
    if dimension is not None and default not in {"", "none"}:
        default = f'"{default} s"'
    written = {"time": 'time, such as "10 s"', "period": 'time or progress, such as "1 epoch"'}
    unit = written.get(dimension or "") or fields.get("unit", "")
    return Key(
        table=table,
        name=field.encode_name,
        type="text" if dimension else type_in_words(field.type),
        default=fields.get("default", default),
        unit=unit,
        effect=fields["effect"],
    )


def type_in_words(kind: inspect.Type) -> str:
    """Return what a value of this type looks like in a job file."""
    match kind:
        case inspect.UnionType(types=types):
            options = [each for each in types if not isinstance(each, inspect.NoneType)]
            structs = [each for each in options if isinstance(each, inspect.StructType)]
            tags = [str(each.tag) for each in structs if each.tag is not None]
            if tags and len(tags) == len(options):
                return "table with a name"
            return " or ".join(type_in_words(each) for each in options)
        case inspect.Metadata(extra_json_schema={"examples": [*examples]}):
            return f"text as {' or '.join(map(str, examples))}"
        case inspect.LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}"
        case inspect.VarTupleType() | inspect.ListType():
            return f"list of {type_in_words(kind.item_type)}"
        case _:
            bounds = _bounds(kind) if isinstance(kind, inspect.IntType | inspect.FloatType) else ""
            return _WORDS[type(kind)] + bounds


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    names = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign}\N{NO-BREAK SPACE}{value:,}" if value < 1e6 else ""
        for name, sign in names.items()
        if (value := getattr(kind, name)) is not None
    ]
    return "".join(f", {text}" for text in found if text)


def _default(field: inspect.Field) -> str:  # noqa: PLR0911 -- one for each type
    value = field.default
    if value is msgspec.NODEFAULT:
        value = field.default_factory() if callable(field.default_factory) else None
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case int() | float():
            return f"{value:g}" if isinstance(value, float) else str(value)
        case {} | [] | ():
            return "empty"
        case msgspec.Struct():
            return f'{{ name = "{value.__struct_config__.tag}" }}'
        case _:
            return str(value)


def _lines() -> Iterator[str]:
    about = tomllib.loads(EFFECTS.read_text())
    for table, group in itertools.groupby(keys(), key=lambda key: key.table):
        found = list(group)
        has_units = any(key.unit for key in found)
        yield from ("", f"## {_heading(table)}", "", about[table]["about"], "")
        yield f"| key | type |{' unit |' if has_units else ''} default | effect |"
        yield f"|---|---|{'---|' if has_units else ''}---|---|"
        for key in found:
            default = f"`{key.default}`" if key.default else "**required**"
            unit = f" {key.unit} |" if has_units else ""
            yield f"| `{key.name}` | {key.type} |{unit} {default} | {key.effect} |"
    yield ""


def _heading(table: str) -> str:
    name, _, variant = table.partition(" (")
    key = "codec" if name == "codec" else "name"
    name = name if name in {"rule", "schedule", "codec"} else f"[{name}]"
    return f'{name}, {key} = "{variant[:-1]}"' if variant else name
