"""Numbers as text, the same on the screen, in logs and in tables; spelling suggestions."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Final


DASH: Final = "-"  # a value that was not measured; never shown as zero
N_KNOWN_MAX: Final = 40  # names in a hint
_SHARES: Final = frozenset({"accuracy", "top5"})
_SHARE: Final = "_share"
# Of terminals; and what shows nothing, ends a line, turns the direction of writing, or is half of a
# character.
_CONTROL: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]"
)


def plain(text: str) -> str:
    """Return foreign text as it may be shown and logged: control characters become "?".

    Line ends and tabs stay.
    """
    return text if text.isprintable() else _CONTROL.sub("?", text)


def plain_in(value: object) -> object:
    """Return what JSON holds, all text in it as by `plain`."""
    match value:
        case str():
            return plain(value)
        case dict():
            return {plain_in(key): plain_in(item) for key, item in value.items()}
        case list():
            return [plain_in(item) for item in value]
        case _:
            return value


def is_share(metric_name: str) -> bool:
    return metric_name in _SHARES


def is_loss(metric_name: str) -> bool:
    """Return whether this metric is the held-out loss, which is shown only once."""
    return metric_name == "loss"


def percent(share: float, decimals: int = 0) -> str:
    return f"{100 * share:.{decimals}f} %"


def joined(separator: str, parts: Iterable[object]) -> str:
    """Join the parts that are text; what does not apply is None, False or 0."""
    return separator.join(part for part in parts if isinstance(part, str) and part)


def metric(value: float | None, name: str) -> str:
    """Return "39.8 %" for shares, else about three digits."""
    if value is None:
        return DASH
    return percent(value, 1) if is_share(name) else figure(value)


def figure(value: float | None) -> str:
    """Return about three digits: "2.34", "0.0123", "1.2e-05"."""
    if value is None:
        return DASH
    return f"{value:.2f}" if 0.1 <= abs(value) < 10_000 else f"{value:.3g}"


def count(value: float | None) -> str:
    """Return "78,900"."""
    return DASH if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Return a rate per second, with a decimal if it is small: "78,900", "3.4"."""
    if value is None:
        return DASH
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def duration(seconds: float | None) -> str:
    """Return "0.4 s", "42 s", "8 m 11 s", "3 h 05 m" or "2 d 04 h"."""
    if seconds is None:
        return DASH
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for length, large, small in ((60, "m", "s"), (60, "h", "m")):
        if whole < length * (60 if large == "m" else 24):
            return f"{whole // 60} {large} {whole % 60:02d} {small}"
        whole //= 60
    return f"{whole // 24} d {whole % 24:02d} h"


def size(n_bytes: float | None) -> str:
    """Return "512 B", "1.5 MB", "26 GB": powers of 1000."""
    if n_bytes is None:
        return DASH
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 999.5:
            decimals = 0 if unit == "B" or n_bytes >= 99.95 else 1
            return f"{n_bytes:.{decimals}f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


def speed(flops: float | None) -> str:
    """Return "41 GFLOP/s", "2.1 TFLOP/s"."""
    if flops is None:
        return DASH
    for unit in ("MFLOP/s", "GFLOP/s"):
        flops /= 1e6 if unit == "MFLOP/s" else 1000
        if flops < 999.5:
            return f"{flops:.{0 if flops >= 9.95 else 1}f} {unit}"
    return f"{flops / 1000:.1f} TFLOP/s"


def staleness(mean: float | None, p95: float | None) -> str:
    """Return "mean 0.9, p95 2"."""
    return f"mean {DASH if mean is None else f'{mean:.1f}'}, p95 {count(p95)}"


def named(figures: Mapping[str, float]) -> list[str]:
    """Return metrics with their names: "gradient norm 0.0123", "backups 12".

    A name that ends in "_share" is shown in percent: "computing 94 %".
    """
    return [
        f"{name.removesuffix(_SHARE)} {percent(value)}"
        if name.endswith(_SHARE)
        else f"{name.replace('_', ' ')} {(count if float(value).is_integer() else figure)(value)}"
        for name, value in figures.items()
    ]


def leave_out(
    columns: dict[str, list[str]], *, width: int, gap: int, order: Iterable[str]
) -> list[str]:
    """Delete columns, in this order, until the rest fits into a line; return which.

    A column is its heading and its cells; `gap` characters stand between two.
    """
    left = []
    for name in order:
        if sum(max(map(len, column)) + gap for column in columns.values()) <= width:
            break
        if columns.pop(name, None) is not None:
            left.append(name)
    return left


def role(name: str) -> str:
    """Return "shard 1" for "shard-1"."""
    return name.replace("-", " ")


# Names that other libraries use. `get_close_matches` cannot guess them from the spelling.
SYNONYMS: Final = {
    "lr": "learning_rate",
    "eta": "learning_rate",
    "batch": "batch_size",
    "bs": "batch_size",
    "criterion": "loss",
    "loss_fn": "loss",
    "optim": "rule",
    "optimizer": "rule",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "workers": "replicas",
    "world_size": "replicas",
    "servers": "shards",
    "args": "arguments",
    "kwargs": "arguments",
    "dataloader_num_workers": "num_workers",
    "collate_fn": "collate",
    "data_collator": "collate",
    "eps": "epsilon",
    "max_norm": "clip_norm",
    "max_grad_norm": "clip_norm",
    "grad_clip": "clip_norm",
    "training": "algorithm",
    "dataset": "data",
    "network": "model",
    "output_dir": "directory",
    "cg": "conjugate-gradient",
    # of Lightning, Accelerate, Transformers and torchrun
    "accelerator": "device",
    "devices": "replicas",
    "num_processes": "replicas",
    "nproc_per_node": "replicas",
    "gradient_clip_val": "clip_norm",
    "gradient_clipping": "clip_norm",
    "accumulate_grad_batches": "accumulate",
    "gradient_accumulation_steps": "accumulate",
    "num_train_epochs": "epochs",
    "train_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "default_root_dir": "directory",
    "save_dir": "directory",
    "num_threads": "threads",
    # of losses
    "mae": "l1",
    "mean_absolute_error": "l1",
    "mean_squared_error": "mse",
    "bce": "binary_cross_entropy",
    "bceloss": "binary_cross_entropy",
    "bce_with_logits": "binary_cross_entropy_with_logits",
    "bcewithlogitsloss": "binary_cross_entropy_with_logits",
    "ce": "cross_entropy",
    "nllloss": "nll",
    "kldivloss": "kl_div",
}


def nearest(word: str, known: Iterable[str], *, only_close: bool = False) -> str:
    """Return a hint for an unknown word: "Did you mean 'n_push'?", or else all known words."""
    known, word = list(known), word.lower()
    here = SYNONYMS.get(word)
    for name in known:  # as in other libraries, or "adamw"
        if name == here or SYNONYMS.get(name) == word or name.lower() == word:
            return f"Did you mean '{name}'?"
    lower = {SYNONYMS[name]: name for name in known if name in SYNONYMS}
    lower |= {name.lower(): name for name in reversed(known)}
    near = [name for name in lower if sorted(name) == sorted(word)]  # "AdaWm"
    near = near or get_close_matches(word, lower, n=1, cutoff=0.6)
    begun = [name for name in lower if name.startswith(word)]  # "tol" of "tolerance"
    if not near and len(begun) == 1:
        near = begun
    if near:
        return f"Did you mean '{lower[near[0]]}'?"
    few = ", ".join(known[:N_KNOWN_MAX]) + (", ..." if len(known) > N_KNOWN_MAX else "")
    return "" if only_close else f"It knows {few}."
