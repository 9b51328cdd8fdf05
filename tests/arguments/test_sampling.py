"""Sampling parameters on their way from flags and datasets to an engine."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from slimelite.arguments import Args, EvalDataset
from slimelite.arguments.flags import all_flags, group_flags, sampling_values
from slimelite.engines.params import SamplingParams, names_at

# a value of each parameter that is no default
SET: dict[str, Any] = {
    "max_new_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 3,
    "min_p": 0.125,
    "min_new_tokens": 2,
    "stop": ("x",),
    "stop_token_ids": (5,),
    "ignore_eos": True,
    "skip_special_tokens": True,
    "seed": 4,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {"5": 1.0},
    "json_schema": "{}",
    "regex": "a",
    "ebnf": "b",
    "structural_tag": "{}",
    "calls": "{}",
    "grammar_after": "c",
    "begun": "d",
    "kept": True,
}


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def test_every_parameter_of_a_place_reaches_the_engine_and_no_other_does() -> None:
    assert SET.keys() == {f.name for f in fields(SamplingParams)}
    rollout = {f"rollout_{names[0]}": plain(SET[name]) for name, names in names_at("rollout").items()}
    found = SamplingParams.of(Args(**rollout), "rollout")
    default = SamplingParams(0)
    for name, value in SET.items():
        assert getattr(found, name) == (value if name in names_at("rollout") else getattr(default, name)), name
    own = {names[0]: plain(SET[name]) for name, names in names_at("dataset").items()}
    found = SamplingParams.of(EvalDataset(name="a", path="b", **own), "dataset")
    for name, value in SET.items():
        assert getattr(found, name) == (value if name in names_at("dataset") else getattr(default, name)), name


def test_a_dataset_takes_those_of_evaluation_then_of_rollouts_then_the_defaults() -> None:
    args = Args(rollout_max_response_len=9, rollout_top_k=8, rollout_stop=["y"], eval_top_k=3, eval_temperature=0.0)
    values = sampling_values(args)
    assert {key: values[key] for key in ("temperature", "top_k", "max_response_len", "min_new_tokens", "stop")} == {
        "temperature": 0.0, "top_k": 3, "max_response_len": 9, "min_new_tokens": 0, "stop": ["y"],
    }  # fmt: skip
    assert values.keys() == {names[0] for names in names_at("dataset").values()}


@pytest.mark.parametrize("place", ["rollout", "eval", "dataset"])
def test_flags_say_what_the_parameters_say(place: Any) -> None:
    known = all_flags(Args) if place != "dataset" else {f.name: f for f in group_flags(EvalDataset)}
    prefix = "" if place == "dataset" else f"{place}_"
    for f in fields(SamplingParams):
        if f.name not in names_at(place) or f.name in ("temperature", "max_new_tokens"):
            continue
        flag = known[prefix + names_at(place)[f.name][0]]
        assert flag.help.startswith(f.metadata["help"])
        assert flag.default == (None if place == "eval" else plain(f.default))
        assert {name: getattr(flag, name) for name in f.metadata["bounds"]} == (
            dict.fromkeys(f.metadata["bounds"]) if place == "eval" else f.metadata["bounds"]
        )


@pytest.mark.parametrize(
    ("count", "room", "most", "fewest"),
    [(0, None, 10, 4), (3, None, 7, 1), (6, None, 4, 0), (3, 2, 2, 1), (0, 2, 2, 2), (10, None, 0, 0), (3, -2, -2, 0)],
)
def test_what_is_left_after_some_tokens(count: int, room: int | None, most: int, fewest: int) -> None:
    left = SamplingParams(10, min_new_tokens=4, temperature=0.5, seed=3).after(count, room)
    assert left == SamplingParams(most, min_new_tokens=fewest, temperature=0.5, seed=3)
