"""How fast codecs of pushes are: GB/s of dense values, on one core, beside a copy and plain C.

    accumulate   adds the residual to a push, and checks that the sum is finite
    encode       writes the words; the sum becomes the rest
    add          checks the words, and adds them to a vector
    push         all that a client does: accumulate, choose and encode

Each by numpy, by numba if it is installed, and by plain C if there is a compiler, with the same
checks. Vectors and words must have the same bits after each. They take turns; what counts is the
processor time of the best one. Numbers are normal, of another scale for each 64 elements.

    python experiments/benchmarks/codecs.py
"""

import argparse
import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest.mock import patch

import numpy as np

from distbelief.parameter_server.codecs import (
    Codec,
    Cut,
    History,
    Residual,
    Words,
    accumulate,
    kernels,
)
from distbelief.parameter_server.codecs.dense import Bfloat16, Int4, Int8
from distbelief.parameter_server.codecs.threshold import Threshold
from distbelief.parameter_server.codecs.top_k import TopK
from experiments.benchmarks.measuring import measurement


C: Final = Path(__file__).with_suffix(".c")
FLAGS: Final = ("-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
KINDS: Final = ("numpy", "numba", "C")
NO_WORDS: Final = np.zeros(0, np.uint32)

Call = Callable[[], object]
Seconds = dict[str, float]  # by kind


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    codec: Codec
    density: float = 0.0  # of steps, which the size of tau gives
    has_yardstick: bool = True


ROWS: Final = (
    Row("bfloat16", Bfloat16()),
    Row("int8", Int8()),
    Row("int4", Int4()),
    Row("top_k", TopK(share=0.01)),
    Row("top_k_2_bits", TopK(share=0.01, bits=2)),
    Row("threshold_0.1_percent", Threshold(), density=0.001),
    Row("threshold_1_percent", Threshold(), density=0.01),
    Row("bitmap_10_percent", Threshold(), density=0.1, has_yardstick=False),
)


def yardstick_in(folder: str) -> ctypes.CDLL | None:
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = Path(folder) / "yardstick.so"
    subprocess.run([compiler, *FLAGS, str(C), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@dataclass(slots=True, eq=False)
class Bench:
    numbers: Residual
    n_turns: int
    has_numba: bool
    yardstick: ctypes.CDLL | None

    def best(self, work: Call, c_work: Call | None, vector: Residual, words: Words) -> Seconds:
        """Return the seconds of each in its best turn; both arrays must have the same bits then."""
        works = {"numpy": work} | ({"numba": work} if self.has_numba else {})
        works |= {} if c_work is None else {"C": c_work}
        seconds, bits = dict.fromkeys(works, float("inf")), set()
        for turn in range(self.n_turns):
            for name, one in works.items():
                vector[:] = self.numbers
                if not turn:
                    words[:] = 0
                with patch.object(kernels, "compiled", self.compiled(name)):
                    start = time.process_time()
                    one()
                    seconds[name] = min(seconds[name], time.process_time() - start)
                if not turn:
                    bits.add(vector.tobytes() + words.tobytes())
                    assert len(bits) == 1, name
        return seconds

    def compiled(self, name: str) -> Callable[[Callable[..., object]], object]:
        return (lambda _: None) if name == "numpy" else kernels.compiled

    def c_call(self, name: str, *arguments: object) -> Call | None:
        if self.yardstick is None:
            return None
        function = getattr(self.yardstick, name)
        taken = [
            ctypes.c_void_p(one.ctypes.data)
            if isinstance(one, np.ndarray)
            else ctypes.c_float(one)
            if isinstance(one, float)
            else one
            for one in arguments
        ]

        def call() -> None:
            assert function(*taken), name

        return call

    def accumulate(self) -> Seconds:
        push, residual = np.empty_like(self.numbers), self.numbers / np.float32(3)
        c_work = self.c_call("accumulate", residual, push, ctypes.c_long(len(push)))
        return self.best(lambda: accumulate(residual, push), c_work, push, NO_WORDS)

    def encode(self, row: Row, codec: Codec, cut: Cut) -> tuple[Seconds, Words]:
        n = len(self.numbers)
        rest, words = self.numbers.copy(), np.zeros(codec.n_words_max(n), np.uint32)
        n_words = codec.encode(rest, cut, words).n_words
        sizes = [one for one in (cut.size, *cut.levels) if one]
        name = f"encode_{codec.form.replace('-', '_')}"
        c_work = None
        if row.has_yardstick:
            c_work = self.c_call(name, rest, words, ctypes.c_long(n), *sizes)
        # Behind the words some leave what they needed on the way.
        seconds = self.best(lambda: codec.encode(rest, cut, words), c_work, rest, words[:n_words])
        return seconds, words[:n_words].copy()

    def add(self, row: Row, codec: Codec, words: Words) -> Seconds:
        vector, n = np.empty_like(self.numbers), len(self.numbers)
        name = f"add_{codec.form.replace('-', '_')}"
        c_work = None
        if row.has_yardstick:
            lengths = ctypes.c_long(n), ctypes.c_long(len(words))
            c_work = self.c_call(name, vector, words, *lengths)
        return self.best(lambda: codec.decoder(words, n)(0, n, vector), c_work, vector, NO_WORDS)


def seconds_of(work: Call) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def own(seconds: Seconds) -> float:
    """Return the seconds of the one that the library takes."""
    return seconds.get("numba", seconds["numpy"])


def columns(seconds: Seconds, n_bytes: int) -> str:
    speeds = [f"{n_bytes / seconds[kind] / 1e9:.2f}" if kind in seconds else "-" for kind in KINDS]
    over_c = f"{own(seconds) / seconds['C']:.2f}" if "C" in seconds else "-"
    return "  " + "".join(f"{column:>7}" for column in (*speeds, over_c))


def named(name: str, seconds: Seconds, n_bytes: int) -> dict[str, float]:
    speeds = {f"{name}_{kind.lower()}": n_bytes / one / 1e9 for kind, one in seconds.items()}
    return {name: n_bytes / own(seconds) / 1e9} | speeds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="GB/s of codecs of pushes on one core.")
    parser.add_argument("--elements", type=int, default=1 << 24, help="a multiple of 128")
    parser.add_argument("--turns", type=int, default=7)
    small = {"elements": 1 << 17, "turns": 1}
    options = measurement.options_of(parser, arguments, small=small)
    generator = np.random.default_rng(0)
    n = options.elements // 128 * 128
    scales = np.exp(generator.standard_normal((n // 64, 1))).astype(np.float32)
    numbers = (generator.standard_normal((n // 64, 64), np.float32) * scales).reshape(-1)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        kernels.warm_up()
        figures["warm_up_seconds"] = time.perf_counter() - start
        has_numba = kernels.compiled(kernels.accumulate) is not None
        bench = Bench(numbers, options.turns, has_numba, yardstick_in(folder))
        if has_numba:
            print(f"numba compiled or loaded its kernels in {figures['warm_up_seconds']:.1f} s")
        else:
            print("numba is not installed")
        if bench.yardstick is None:
            print("the yardstick is missing: there is no C compiler, `cc`")
        target = np.zeros(n, np.float32)
        copies = [seconds_of(lambda: np.copyto(target, numbers)) for _ in range(options.turns)]
        figures["copy"] = numbers.nbytes / min(copies) / 1e9
        print(
            f"{n} elements; a copy: {figures['copy']:.1f} GB/s; 'over C': seconds over those of C"
        )
        accumulated = bench.accumulate()
        figures |= named("accumulate", accumulated, numbers.nbytes)
        kinds = "  " + "".join(f"{kind:>7}" for kind in (*KINDS, "over C"))
        print(f"\n{'':22}{'bytes':>7}{'push':>7}  {'encode':28}  add")
        print(f"{'':36}{kinds}{kinds}")
        print(f"{'accumulate':36}{columns(accumulated, numbers.nbytes)}")
        for row in ROWS:
            codec = row.codec
            if row.density:
                sizes = np.partition(np.abs(numbers), -int(row.density * n))
                codec = Threshold(tau=float(sizes[-int(row.density * n)]))
            chosen = [
                seconds_of(lambda: codec.choose([numbers], History()))  # noqa: B023
                for _ in range(options.turns)
            ]
            encoded, words = bench.encode(row, codec, codec.choose([numbers], History()))
            added = bench.add(row, codec, words)
            push = numbers.nbytes / (own(accumulated) + min(chosen) + own(encoded)) / 1e9
            figures |= {f"{row.name}_bytes": len(words) / n, f"{row.name}_push": push}
            figures |= named(f"{row.name}_encode", encoded, numbers.nbytes)
            figures |= named(f"{row.name}_add", added, numbers.nbytes)
            line = f"{row.name:22}{len(words) / n:7.2%}{push:7.2f}"
            print(line + columns(encoded, numbers.nbytes) + columns(added, numbers.nbytes))
    measurement.conclude("codecs", figures)


if __name__ == "__main__":
    main()
