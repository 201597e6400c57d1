"""Choices of an exchange: each combination is valid, or refused by one sentence with two keys."""

import itertools
import re

import msgspec
import pytest

from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.worker.downpour_settings import DownpourSettings


CHOICES: dict[str, tuple[object, ...]] = {
    "every": (1, 4, "auto"),
    "send": ("gradient", "delta"),
    "staleness": (None, 0, 3),
    "round": (None, {}, {"quorum": 0.75, "grace_seconds": 2.0}),
    "weight": ("sum", "mean", "samples"),
    "damping": ("none", "inverse", "excess"),
    "numbers": ("float32", "bfloat16"),
}
RULES = [
    {"name": "sgd", "learning_rate": 1.0},
    {"name": "momentum", "learning_rate": 0.7},
    {"name": "adagrad", "learning_rate": 0.1},
    {"name": "rmsprop", "learning_rate": 0.1},
    {"name": "delayed_nesterov", "learning_rate": 0.7, "n_pushes": 4},
    {"name": "adam", "learning_rate": 0.1},
]
INNER = [None, {"name": "SGD", "lr": 0.1}]
KEYS = {*CHOICES, "route", "rule", "inner"}


def test_every_combination_is_valid_or_refused_by_one_sentence_that_names_both_keys() -> None:
    reasons: dict[str, int] = {}
    n_valid = 0
    usual = {"loss": "mse", "batch_size": 4}
    for values in itertools.product(*CHOICES.values()):
        exchange = dict(zip(CHOICES, values, strict=True))
        for rule, inner, workers in itertools.product(RULES, INNER, (1, 4)):
            given = {**usual, "exchange": exchange, "rule": rule, "inner": inner}
            try:
                settings = msgspec.convert(given, DownpourSettings)
                settings.exchange.refuse(settings.rule, inner=inner is not None, workers=workers)
            except ValueError as error:
                said = str(error).partition(" - at ")[0]
                reasons[re.sub(r"\d+|'\w+'", "#", said)] = 1
                what, _, mend = said.rpartition(": ")
                assert len(KEYS & set(re.findall(r"\w+", what))) >= 2, said
                assert re.match(r"use |give |leave |both say when to exchange: leave ", mend), said
                assert "\n" not in said
                assert ". " not in said, "more than one sentence"
                continue
            n_valid += 1
            assert settings.pace.n_push == (4 if exchange["every"] != 1 else 1)
            assert settings.pace.blocking == (exchange["staleness"] is not None)
            assert settings.pace.sends_delta == (inner is not None)
    assert n_valid > 500
    assert len(reasons) == 10, "\n".join(reasons)


def test_a_ring_is_of_whole_gradients_in_each_step_and_all_else_is_refused() -> None:
    n_valid = 0
    for values in itertools.product(*CHOICES.values()):
        given = dict(zip(CHOICES, values, strict=True))
        try:
            policy = msgspec.convert({**given, "route": "ring"}, ExchangePolicy)
        except ValueError as error:
            said = str(error).partition(" - at ")[0]
            what, _, mend = said.rpartition(": ")
            assert len(KEYS & set(re.findall(r"\w+", what))) >= 2, said
            assert re.match(r"use |leave ", mend), said
            continue
        n_valid += 1
        assert (policy.every, policy.send, policy.staleness) == (1, "gradient", 0)
        assert policy.round == Round()
        assert policy.weight != "samples"
    assert n_valid == 2  # sum, mean


def test_commits_are_some_steps_apart() -> None:
    with pytest.raises(ValueError, match="commit_every is 0; use 1 or more"):
        ExchangePolicy(commit_every=0)
