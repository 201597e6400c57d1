"""Decodes one table of a job file into a struct, with readable errors.

msgspec decides what is valid. This module finds unknown and missing keys before it, because it can
suggest the nearest known key, and rewrites msgspec's errors in terms of the job file.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TypeVar, cast

import msgspec
from msgspec import inspect

from distbelief.config import presets, toml
from distbelief.core import units
from distbelief.core.errors import JobError, JobFileError
from distbelief.core.formatting import SYNONYMS, nearest


Path = tuple[str, ...]  # keys, from the top of the file
S = TypeVar("S", bound=msgspec.Struct)
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": 'text in quotes: "..."',
    "bool": "true or false",
    "array": "a list: [...]",
    "object": "a table: { ... }",
}
_JSON_TYPES: dict[type[inspect.Type], str] = {
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.StrType: "str",
    inspect.BoolType: "bool",
    inspect.ListType: "array",
    inspect.DictType: "object",
    inspect.StructType: "object",
}
_BOUNDS = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}
_EXPECTED = re.compile(
    r"Expected `(?P<type>[^`]*)`(?: (?P<relation>[<>]=?) (?P<bound>\S+))?"
    r"(?: of length (?P<length>[<>=]*\d+))?(?:, got \S+)?"
)


_RULE = "rule of [algorithm], as in rule = {{ name = {}, {} }}"
# Keys that users often put into the wrong table.
_PLACES = {
    "epochs": "[stop]",
    "samples": "[stop]",
    "batch_size": "[algorithm]",
    "n_push": "[algorithm]",
    "loss": "[algorithm]",
    "rule": "[algorithm]",
    "clip_norm": "[algorithm]",
    "preset": "[algorithm]",
    "groups": "[algorithm.rule]",
    "replicas": "[cluster]",
    "shards": "[cluster]",
    "partitions": "[cluster]",
    "device": "[cluster]",
    "threads": "[cluster]",
    "num_workers": "[data.train]",
    "metric": "[evaluation]",
    "directory": "[output]",
    "keep": "[output]",
    "callbacks": "[output]",
    "min_delta": "[stop]",
    "limit": "[data.train]",
    "learning_rate": _RULE.format('"sgd"', "learning_rate = 0.1"),
    "weight_decay": _RULE.format('"sgd"', "learning_rate = 0.1, weight_decay = 1e-4"),
    "momentum": _RULE.format('"momentum"', "learning_rate = 0.1, momentum = 0.9"),
}

_READS = (
    "Each replica reads its next batches while it computes, by itself or by as many processes as "
    "num_workers of [data.train] says: leave it out."
)
_SCHEDULE = (
    'It is the schedule of the rule, as in rule = { name = "sgd", learning_rate = 0.1, '
    'schedule = { name = "cosine", n_pushes = 10000, n_warm_up = 100 } }.'
)
_PRECISION = (
    "Models compute in their own types, and under torch.autocast where their forward says so; "
    'numbers = "bfloat16" in [algorithm.exchange] halves what hosts send.'
)
_STEPS = "It is samples of [stop]: steps times batch_size."
_TEST = "Held-out data are the table [data.test]."
_RESUME = "It is a flag: distbelief train --resume RUN_DIR."
_HOSTS = "Hosts join a job: distbelief train JOB --listen tcp://0.0.0.0:7700 --hosts N."
_PLACEMENT = "Processes find each other by themselves: leave it out."
# Keys of other libraries that are no key here.
_ELSEWHERE = {
    **dict.fromkeys(("pin_memory", "persistent_workers", "prefetch_factor"), _READS),
    **dict.fromkeys(("scheduler", "lr_scheduler", "warmup_steps", "lr_decay"), _SCHEDULE),
    **dict.fromkeys(("precision", "mixed_precision", "amp", "fp16", "bf16"), _PRECISION),
    **dict.fromkeys(("val", "valid", "validation", "eval_data", "val_data", "test_data"), _TEST),
    **dict.fromkeys(("resume", "ckpt_path", "resume_from_checkpoint"), _RESUME),
    **dict.fromkeys(("num_nodes", "nnodes", "num_machines"), _HOSTS),
    **dict.fromkeys(("backend", "rank", "local_rank", "init_method", "master_addr"), _PLACEMENT),
    "shuffle": "Each epoch has an order of its own, from [algorithm] seed: leave it out.",
    **dict.fromkeys(
        ("sampler", "batch_sampler", "drop_last"),
        "Let the function of [data.train] return a torch DataLoader that has it.",
    ),
    "strategy": 'It is [algorithm] preset, such as "downpour" or "diloco": distbelief presets.',
    **dict.fromkeys(
        ("val_check_interval", "eval_steps", "eval_every"),
        'It is every of [evaluation]: every = "10 s", "1 epoch" or "500 steps".',
    ),
    **dict.fromkeys(
        ("early_stopping", "early_stopping_patience"), "It is patience of [stop]: patience = 5."
    ),
    **dict.fromkeys(
        ("save_top_k", "load_best_model_at_end", "save_best", "monitor"),
        'It is keep of [output], by the first metric: keep = "best".',
    ),
    **dict.fromkeys(
        ("limit_train_batches", "limit_val_batches", "overfit_batches", "fast_dev_run"),
        "It is limit of [data.train] and [data.test], in samples: limit = 64.",
    ),
    **dict.fromkeys(("max_steps", "n_steps", "num_steps"), _STEPS),
    "gradient_clip_algorithm": "By norm it is clip_norm; by value it is clip_value of the rule.",
    **dict.fromkeys(("max_time", "time_limit"), 'It is seconds of [stop]: seconds = "10 min".'),
    **dict.fromkeys(
        ("log_every_n_steps", "logging_steps", "log_every"),
        'It is report_every of [output], a time: report_every = "2 s".',
    ),
    **dict.fromkeys(
        ("save_steps", "save_every", "checkpoint_every"),
        'It is snapshot_every of [output], a time: snapshot_every = "30 s".',
    ),
    **dict.fromkeys(
        ("nesterov", "dampening"),
        'It is an option of rule = { name = "momentum", learning_rate = 0.1, momentum = 0.9 }.',
    ),
    "betas": "Give beta1 and beta2.",
    **{name.lower(): text for name, text in presets.KNOBS.items()},
}

_OF_WHOLE_TENSORS = (
    'Its steps depend on whole tensors, of which a shard holds parts: use another, as "AdamW".'
)
# Names from elsewhere that need more than another name here.
_NAMES = {
    "adafactor": _OF_WHOLE_TENSORS,
    "muon": _OF_WHOLE_TENSORS,
    "lbfgs": 'It is [algorithm] name = "sandblaster", method = "l-bfgs".',
    "sparseadam": 'Pushes are dense: use "Adam".',
}


class TableError(JobFileError):
    """An error at one place of the job file; the caller adds the file's name."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(text)
        self.path = path  # of the table or key at fault
        self.text = text


def decode(value: object, struct: type[S], *, path: Path) -> S:
    table = as_table(value, path)
    _check_keys(table, _kind(struct), path)
    try:
        return msgspec.convert(_without_units(table, struct, path), struct)
    except msgspec.ValidationError as error:
        raise _explained(error, table, path) from None
    except JobError as error:  # from a struct's __post_init__
        raise TableError(path, _headed(str(error), path)) from None


def with_whole_groups(table: Mapping[str, object]) -> dict[str, object]:
    """Complete the groups of the rules in a table: those without a name.

    As in torch, such a group has the keys of the rule itself where it has none of its own.
    """
    whole = dict(table)
    rule, warm_start = whole.get("rule"), whole.get("warm_start")
    if isinstance(rule, dict) and isinstance(rule.get("groups"), dict):
        usual = {name: value for name, value in rule.items() if name != "groups"}
        groups = {
            pattern: {**usual, **one} if isinstance(one, dict) and "name" not in one else one
            for pattern, one in rule["groups"].items()
        }
        whole["rule"] = {**rule, "groups": groups}
    if isinstance(warm_start, dict):
        whole["warm_start"] = with_whole_groups(warm_start)
    return whole


def convert(table: Mapping[str, object], struct: type[S], *, user: str) -> S:
    """Return arguments of a call as a struct; or raise JobError, in the words of a job file."""
    try:
        return decode(table, struct, path=())
    except TableError as error:
        raise JobError(f"{user}: {error.text.removeprefix(f'{header(())} ')}") from None


def encode(struct: msgspec.Struct) -> dict[str, object]:
    """Return a struct as the table that `decode` reads; what is None is left out."""
    table = cast("dict[str, object]", _without_none(msgspec.to_builtins(struct)))
    for key, dimension in units_of(type(struct)).items():
        match table.get(key):
            case float() | int() as quantity:
                table[key] = units.show(quantity, dimension)
            case {"n": float(n), "of": str(unit)}:
                table[key] = units.show_count(n, unit)
    return table


def _without_none(value: object) -> object:
    match value:
        case dict():
            return {k: _without_none(v) for k, v in value.items() if v is not None}
        case list() | tuple():
            return [_without_none(item) for item in value]
        case _:
            return value


@cache
def units_of(struct: type[msgspec.Struct]) -> Mapping[str, units.Dimension]:
    """Return the keys of a table that are written with units: `Meta(extra={"unit": ...})`."""
    kind = _kind(struct)
    assert isinstance(kind, inspect.StructType)
    return {
        field.encode_name: option.extra["unit"]
        for field in kind.fields
        for option in getattr(field.type, "types", (field.type,))
        if isinstance(option, inspect.Metadata) and option.extra
    }


@cache  # msgspec evaluates the annotations of all fields each time
def _kind(struct: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(struct)


def as_table(value: object, path: Path) -> dict[str, object]:
    if isinstance(value, dict):
        return value
    name = ".".join(path)
    raise TableError(path, f"{name} = {toml.excerpt(value)}: wants a table; begin it with [{name}]")


def check_known(table: Mapping[str, object], known: Iterable[str], path: Path) -> None:
    known = list(known)
    for key in table:
        if key not in known:
            meant = SYNONYMS.get(key.lower(), key)
            is_here = meant in known or any(SYNONYMS.get(one) == meant for one in known)
            hint = nearest(key, known)
            if key.lower() in _ELSEWHERE:
                hint = _ELSEWHERE[key.lower()]
            elif not is_here and _PLACES.get(meant, header(path)) != header(path):
                hint = f"'{meant}' belongs into {_PLACES[meant]}."
            raise TableError((*path, key), f"{header(path)} has no key '{key}'. {hint}")


def header(path: Path) -> str:
    return f"[{'.'.join(path)}]" if path else "The job file"


def _wanted(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.UnionType) and _tags(kind):
        return f"a table with name = {_either(_tags(kind))}"
    return _WORDS.get(_JSON_TYPES.get(type(kind), ""), "a value")


def _check_keys(value: object, kind: inspect.Type, path: Path) -> None:
    # Before msgspec, which does not know the nearest key. Values of another type are its business.
    options = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if isinstance(value, str | float):
        literals = (option for option in options if isinstance(option, inspect.LiteralType))
        words = [str(word) for literal in literals for word in literal.values]
        words += _examples(options, value)
        takes_floats = any(isinstance(option, inspect.FloatType) for option in options)
        if words and value not in words and not (takes_floats and isinstance(value, float)):
            takes_number = any(isinstance(option, inspect.IntType) for option in options)
            wanted = ("a whole number or " if takes_number else "") + _either(words)
            place = f"{header(path[:-1])} {path[-1]}"
            raise TableError(path, f"{place} = {toml.excerpt(value)}: wants {wanted}")
    if not isinstance(value, dict):
        return
    if isinstance(kind, inspect.DictType):  # of tables, by names of the user's
        for key, item in value.items():
            here = (*path, str(key))
            if isinstance(kind.value_type, inspect.UnionType) and _tags(kind.value_type):
                # msgspec would not say which of them has an error.
                table = as_table(item, here)
                decode(table, _chosen(table, _tags(kind.value_type), here).cls, path=here)
            else:
                _check_keys(item, kind.value_type, here)
        return
    if isinstance(kind, inspect.UnionType):
        structs: list[inspect.Type] = [
            option for option in options if isinstance(option, inspect.StructType)
        ]
        kind = _chosen(value, _tags(kind), path) if _tags(kind) else (structs or [kind])[0]
    if not isinstance(kind, inspect.StructType):
        return
    fields = {field.encode_name: field for field in kind.fields}
    check_known(value, [kind.tag_field, *fields] if kind.tag_field else fields, path)
    for key, field in fields.items():
        if key in value:
            _check_keys(value[key], field.type, (*path, key))
        elif field.required:
            raise TableError(
                path, f"{header(path)} lacks the key '{key}': give it {_wanted(field.type)}"
            )


def _examples(options: Iterable[inspect.Type], value: object) -> list[str]:
    """Return examples of texts that have a form; or the value, if it has that."""
    for option in options:
        match option:
            case inspect.Metadata(
                type=inspect.StrType(pattern=str(form)), extra_json_schema={"examples": [*shown]}
            ):
                is_so = isinstance(value, str) and re.search(form, value) is not None
                return [str(value)] if is_so else [str(one) for one in shown]
            case _:
                pass
    return []


def _chosen(
    value: dict[str, object], structs: dict[str, inspect.StructType], path: Path
) -> inspect.StructType:
    tag_field = next(iter(structs.values())).tag_field or "name"
    tag = value.get(tag_field)
    if tag is None:
        raise TableError(
            path, f"{header(path)} lacks the key '{tag_field}': give it {_either(structs)}"
        )
    if not isinstance(tag, str) or tag not in structs:
        raise TableError(
            (*path, tag_field),
            f"{header(path)} {tag_field} = {toml.excerpt(tag)}: unknown. "
            f"{_NAMES.get(str(tag).lower()) or nearest(str(tag), structs)}",
        )
    return structs[tag]


def _tags(kind: inspect.UnionType) -> dict[str, inspect.StructType]:
    options = (option for option in kind.types if isinstance(option, inspect.StructType))
    return {str(option.tag): option for option in options if option.tag is not None}


def _either(names: Iterable[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)


def _without_units(
    table: dict[str, object], struct: type[msgspec.Struct], path: Path
) -> dict[str, object]:
    plain = dict(table)
    for key, dimension in units_of(struct).items():
        if key not in table:
            continue
        count = units.parse_count(table[key]) if dimension == "period" else None
        if count is not None:
            plain[key] = dict(zip(("n", "of"), count, strict=True))
            continue
        try:
            plain[key] = units.parse(table[key], dimension)
        except JobFileError as error:
            raise TableError((*path, key), f"{header(path)} {key} = {error}") from None
    return plain


def _explained(error: msgspec.ValidationError, table: dict[str, object], path: Path) -> TableError:
    text, _, place = str(error).partition(" - at `$")
    below = tuple(re.findall(r"\.([^.\[`]+)", place))
    match = _EXPECTED.fullmatch(text)
    if match is None:  # a ValueError of some __post_init__
        return TableError(path, _headed(text, (*path, *below)))
    value = _at(table, below)
    where = f"{header((*path, *below[:-1]))} {below[-1]}" if below else header(path)
    item = re.search(r"\[\d+\]`$", place)
    if item is not None and isinstance(value, list | tuple):
        where += item[0][:-1]
        value = value[int(item[0][1:-2])]
    options = [option for option in match["type"].split(" | ") if option != "null"]
    wants = " or ".join(_WORDS.get(option, option) for option in options)
    if match["relation"]:
        if isinstance(value, str):  # it had a unit
            wants = "a quantity"
        wants += f", {_BOUNDS[match['relation']]} {match['bound'].removesuffix('.0')}"
    if match["length"]:
        wants += f", of length {match['length']}"
    return TableError((*path, *below), f"{where} = {toml.excerpt(value)}: wants {wants}")


def _at(value: object, path: Path) -> object:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else value
    return value


def _headed(text: str, path: Path) -> str:
    return text if text.startswith("[") else f"{header(path)} {text}"
