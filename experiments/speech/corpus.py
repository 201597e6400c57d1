"""The cache of corpora; run as a program, it fills it.

    python -m experiments.speech.corpus --cache FOLDER train:2 test:0.5

A corpus is built once and mapped by every process that trains on it. The work is done
by `builder`, in a process of its own.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cache import CacheError, find_cache
from experiments.speech.errors import SpeechError
from experiments.speech.recipe import Recipe
from experiments.speech.volume import open_volume


STOP_SECONDS = 10.0


def ensure(recipes: Sequence[Recipe], *, cache: Path, n_workers: int | None = None) -> None:
    """Build the recipes that are not in `cache`, in a fresh process, in this order."""
    missing = [recipe for recipe in recipes if not is_built(recipe, cache=cache)]
    if not missing:
        return
    arguments = [
        *(sys.executable, "-m", "experiments.speech.builder"),
        *("--cache", str(cache)),
        *("--workers", str(n_workers or len(os.sched_getaffinity(0)))),
        *(recipe.spell() for recipe in missing),
    ]
    root = str(Path(__file__).parents[2])
    inherited = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root,
        # One session per core is the parallelism, and features have the same bits.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as builder:
        try:
            answer, _ = builder.communicate()
        except BaseException:
            _stop(builder)
            raise
    if builder.returncode != 0:
        raise CacheError(answer.strip() or _describe_end(builder.returncode))


def is_built(recipe: Recipe, *, cache: Path) -> bool:
    """Whether the corpus is in the cache; its folder appears all at once."""
    return (cache / recipe.name).exists()


def _stop(builder: subprocess.Popen[str]) -> None:
    """End the builder; it has a moment to clear away what is half built."""
    builder.terminate()
    try:
        builder.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        builder.kill()


def _describe_end(status: int) -> str:
    how = f"was ended by signal {-status}" if status < 0 else f"ended with {status}"
    return f"the process that synthesises speech {how}; start again to build it anew"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Synthesise speech into the cache.")
    parser.add_argument("--cache", help="folder (default: the user's cache directory)")
    parser.add_argument("--workers", type=int, help="processes (default: every core)")
    parser.add_argument("recipes", nargs="+", metavar="PART:HOURS[:SEED[:clean]]")
    options = parser.parse_args(arguments)
    cache = find_cache("speech", options.cache)
    try:
        recipes = [Recipe.read(spelling) for spelling in options.recipes]
        ensure(recipes, cache=cache, n_workers=options.workers)
        for recipe in recipes:
            open_volume(cache / recipe.name).verify()
            print(cache / recipe.name)
    except (SpeechError, CacheError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; what was half built is gone", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
