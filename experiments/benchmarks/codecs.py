"""How fast codecs of pushes are: GB/s of dense values, on one core, beside a copy and plain C.

`encode` adds a gradient to the residual, chooses the cut and encodes; `decode` adds the words to a
vector. The yardstick does the same in one pass of C each (without a choice), compiled here if there
is a compiler; its words and its rest must be those of the codec. They take turns; what counts is
the processor time of the best one. Numbers are normal, of another scale for each 64 elements.

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

import numpy as np

from distbelief.parameter_server.codecs import Codec
from distbelief.parameter_server.codecs.books import Cut, History, Residual, Words
from distbelief.parameter_server.codecs.dense import Bfloat16, Int4, Int8
from distbelief.parameter_server.codecs.threshold import Threshold
from distbelief.parameter_server.codecs.top_k import TopK
from experiments.benchmarks.measuring import measurement


PIECE: Final = 1 << 16
C: Final = Path(__file__).with_suffix(".c")
FLAGS: Final = ("-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    codec: Codec
    c_name: str  # of its functions
    density: float = 0.0  # of steps, which the size of tau gives


ROWS: Final = (
    Row("bfloat16", Bfloat16(), "bfloat16"),
    Row("int8", Int8(), "int8"),
    Row("int4", Int4(), "int4"),
    Row("top_k", TopK(share=0.01), "top_k"),
    Row("top_k_2_bits", TopK(share=0.01, bits=2), ""),
    Row("threshold_0.1_percent", Threshold(), "threshold", 0.001),
    Row("threshold_1_percent", Threshold(), "threshold", 0.01),
    Row("bitmap_10_percent", Threshold(), "", 0.1),
)


def compiled(folder: str) -> ctypes.CDLL | None:
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = Path(folder) / "yardstick.so"
    subprocess.run([compiler, *FLAGS, str(C), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def address(array: Residual | Words) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@dataclass(slots=True, eq=False)
class Bench:
    gradient: Residual
    n_turns: int
    yardstick: ctypes.CDLL | None

    def best(self, works: dict[str, tuple[Residual, Call]]) -> dict[str, float]:
        """Return the GB/s of each in its best turn, which begins with zeros in its vector."""
        seconds = dict.fromkeys(works, float("inf"))
        for _ in range(self.n_turns):
            for name, (vector, work) in works.items():
                vector[:] = 0
                start = time.process_time()
                work()
                seconds[name] = min(seconds[name], time.process_time() - start)
        return {name: self.gradient.nbytes / one / 1e9 for name, one in seconds.items()}

    def row(self, row: Row) -> dict[str, float]:
        gradient, codec = self.gradient, row.codec
        n = len(gradient)
        if row.density:
            size = np.partition(np.abs(gradient), -int(row.density * n))[-int(row.density * n)]
            codec = Threshold(tau=float(size))
        residual, vector = np.zeros(n, np.float32), np.zeros(n, np.float32)
        cut = codec.choose([gradient], History())
        words = np.zeros(codec.n_words_max(n), np.uint32)
        n_words = 0

        def encode() -> None:
            nonlocal n_words
            residual.__iadd__(gradient)
            codec.choose([residual], History())
            n_words = codec.encode(residual, cut, words).n_words

        works: dict[str, tuple[Residual, Call]] = {"encode": (residual, encode)}
        c_words, c_rest = np.zeros_like(words), np.zeros_like(residual)
        if self.yardstick is not None and row.c_name:
            works["C encode"] = c_rest, self.c_encode(row.c_name, c_rest, cut, c_words)
        figures = self.best(works)
        sent = words[:n_words]
        if "C encode" in works:
            assert residual.tobytes() == c_rest.tobytes(), row
            assert sent.tobytes() == c_words[:n_words].tobytes(), row

        def decode() -> None:
            add = codec.decoder(sent, n)
            for start in range(0, n, PIECE):
                stop = min(start + PIECE, n)
                add(start, stop, vector[start:stop])

        works = {"decode": (vector, decode)}
        c_vector = np.zeros_like(vector)
        if self.yardstick is not None and row.c_name:
            function = getattr(self.yardstick, f"decode_{row.c_name}")
            arguments = address(c_vector), address(sent), ctypes.c_long(n), ctypes.c_long(n_words)
            works["C decode"] = c_vector, lambda: function(*arguments)
        figures |= self.best(works)
        if "C decode" in works:
            assert vector.tobytes() == c_vector.tobytes(), row
        return figures | {"bytes": n_words / n}

    def c_encode(self, name: str, rest: Residual, cut: Cut, words: Words) -> Call:
        function = getattr(self.yardstick, f"encode_{name}")
        arguments = address(rest), address(self.gradient), address(words)
        size, n = ctypes.c_float(cut.size), ctypes.c_long(len(rest))
        return lambda: function(*arguments, n, size)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="GB/s of codecs of pushes on one core.")
    parser.add_argument("--elements", type=int, default=1 << 23, help="a multiple of 128")
    parser.add_argument("--turns", type=int, default=7)
    small = {"elements": 1 << 17, "turns": 1}
    options = measurement.options_of(parser, arguments, small=small)
    generator = np.random.default_rng(0)
    n = options.elements // 128 * 128
    scales = np.exp(generator.standard_normal((n // 64, 1))).astype(np.float32)
    gradient = (generator.standard_normal((n // 64, 64), np.float32) * scales).reshape(-1)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(gradient, options.turns, compiled(folder))
        target = np.zeros(n, np.float32)
        figures |= bench.best({"copy": (target, lambda: np.copyto(target, gradient))})
        print(f"{n} elements; a copy: {figures['copy']:.1f} GB/s\n")
        columns = ("encode", "C encode", "decode", "C decode")
        print(f"{'codec':20}{'bytes':>8}" + "".join(f"{column:>10}" for column in columns))
        for row in ROWS:
            found = bench.row(row)
            line = f"{row.name:20}{found['bytes']:8.2%}"
            for column in columns:
                line += f"{found[column]:10.2f}" if column in found else f"{'-':>10}"
            print(line)
            figures |= {f"{row.name}_{key}".replace(" ", "_"): one for key, one in found.items()}
    measurement.conclude("codecs", figures)


if __name__ == "__main__":
    main()
