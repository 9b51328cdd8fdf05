"""What there are several of is listed once; an estimator in a file of a user's appears wherever estimators are read."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from scripts.lib.arithmetic import write_model_folder
from slimelite.algorithms.advantages import RolloutTokens, token_advantages
from slimelite.algorithms.estimators import ESTIMATORS
from slimelite.algorithms.groups import group_advantages
from slimelite.algorithms.losses import AGGREGATIONS, CORRECTIONS, DPO_KINDS, KL_KINDS, LEVELS, LOSSES, MODES
from slimelite.algorithms.policy import policy_loss
from slimelite.arguments import Args, RewardArgs
from slimelite.arguments.flags import ArgumentError, all_flags
from slimelite.arguments.help import help_text
from slimelite.arguments.parse import make_args
from slimelite.base.guard import PluginError
from slimelite.base.registry import Registry, function
from slimelite.cluster.workers import EngineFactory
from slimelite.data.conversations import ChatReader
from slimelite.data.tokenizer import load_tokenizer
from slimelite.engines.registry import ENGINES
from slimelite.models.families import LOSS_MASKS
from slimelite.rewards.grader import Grader
from slimelite.rewards.rules import RULES
from slimelite.samples.sample import COLUMNS
from slimelite.training.loss import Loss, corrected, micro_batch_loss

ROOT = Path(__file__).parents[2]
TREES = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "slimelite").rglob("*.py"))}
RUN = "--hf-checkpoint org/model --prompt-data x.jsonl --rollout-batch-size 2 --n-samples-per-prompt 2 --num-rollout 1"
RUN += " --rollout-max-response-len 8 --device cpu"


def registries() -> list[tuple[Path, Registry[Any]]]:
    """Each registry of an option's values, with the file that fills it."""
    found = []
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Registry"):
                module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
                found += [(path, getattr(module, ast.unparse(target))) for target in node.targets]
    # the columns of the table are words of slime's samples and of SGLang's answers as well
    return [(path, registry) for path, registry in found if registry is not COLUMNS]


def test_no_second_list_of_names() -> None:
    """No tuple, list, set or dict has two names of a registry, except in the file that fills it."""
    homes = [(home, registry.option, {*registry}) for home, registry in registries()]
    second = []
    assert len(homes) >= 8
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            entries: list[ast.expr | None] = []
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                entries = [*node.elts]
            elif isinstance(node, ast.Dict):
                entries = [*node.keys, *node.values]
            names = {entry.value for entry in entries if isinstance(entry, ast.Constant)}
            second += [
                f"{path.relative_to(ROOT)}:{node.lineno} lists {sorted(names & listed)} of {option}"
                for home, option, listed in homes
                if home != path and len(names & listed) > 1
            ]
    assert second == []


def test_functions_and_flags_that_records_name_are_there() -> None:
    for registry in (LOSSES, CORRECTIONS, LEVELS, MODES, DPO_KINDS):
        for record in registry.values():
            assert set(record.reads) <= set(all_flags(Args))
    for estimator in ESTIMATORS.values():
        for reference in (estimator.group, estimator.token, estimator.loss):
            assert reference is None or callable(function(reference))


MEDIAN = '''
"""Rewards less the median of their group."""

import torch

from slimelite.algorithms.estimators import ESTIMATORS, Estimator


def minus_median(rewards):
    medians = [rewards.rewards[rewards.group == g].median() for g in range(len(rewards.size))]
    return rewards.rewards - torch.stack(medians)[rewards.group]


ESTIMATORS.add(Estimator("median", "R − median of the responses to a prompt", group=minus_median))
'''


@pytest.fixture
def median(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An estimator that one file outside the package adds."""
    monkeypatch.setitem(ESTIMATORS, "median", None)  # it is gone after the test
    del ESTIMATORS["median"]
    (tmp_path / "median.py").write_text(MEDIAN)
    spec = importlib.util.spec_from_file_location("median", tmp_path / "median.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.usefixtures("median")
def test_an_estimator_is_one_file() -> None:
    assert "ppo,grpo_turns,ppo_turns,median" in help_text(Args, ["--help-all"])
    args = make_args(f"{RUN} --advantage-estimator median --gamma 0.5".split())
    assert args.estimator.name == "median"
    assert dict(args.no_effect)["--gamma"].endswith(
        "--advantage-estimator reinforce_plus_plus, ppo, grpo_turns or ppo_turns"
    )
    with pytest.raises(ArgumentError, match=r"--kl-coef 0.1 has no effect with median: use --use-kl-loss"):
        make_args(f"{RUN} --advantage-estimator median --kl-coef 0.1".split())
    with pytest.raises(ArgumentError, match="--n-samples-per-prompt 1: median compares the responses to a prompt"):
        make_args(f"{RUN} --advantage-estimator median --n-samples-per-prompt 1".split())
    rewards, ids = np.array([3.0, 1.0, 2.0, 7.0]), np.array([0, 0, 0, 1])
    advantages, _ = group_advantages(rewards, ids, np.arange(4), "median")
    assert advantages.tolist() == [1.0, -1.0, 0.0, 0.0]


@pytest.mark.parametrize("wrong", [torch.ones(3), torch.ones(2, 1), None])
def test_an_estimator_that_returns_another_shape_is_refused(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be indexed or broadcast to advantages of other samples."""
    ids = torch.tensor([0, 0]), torch.tensor([0, 1])
    tokens = RolloutTokens(torch.ones(2), torch.zeros(2), torch.ones(2) > 0, ids[1])
    calls = {
        "group": lambda: group_advantages(np.array([0.0, 1.0]), ids[0].numpy(), ids[1].numpy(), "own"),
        "token": lambda: token_advantages("own", tokens),
    }
    for part, call in calls.items():
        own = replace(ESTIMATORS["rloo"], name="own", **{part: lambda _: wrong})
        monkeypatch.setitem(ESTIMATORS, "own", own)
        with pytest.raises(ValueError, match=rf"own: its {part} function returned .*shape \[2\]"):
            call()
    own = replace(ESTIMATORS["rloo"], name="own", loss=lambda *_, **__: (wrong, {}))
    monkeypatch.setitem(ESTIMATORS, "own", own)
    with pytest.raises(ValueError, match=r"own: its loss function returned .*shape \[2\]"):
        policy_loss(*torch.zeros(3, 2), torch.ones(2) > 0, ids[1], 2, "own", eps_clip=0.2)
    monkeypatch.setitem(ESTIMATORS, "own", replace(own, loss=lambda *_, **__: wrong))
    with pytest.raises(ValueError, match=r"own: its loss function returned a .*a pair of losses and metrics"):
        policy_loss(*torch.zeros(3, 2), torch.ones(2) > 0, ids[1], 2, "own", eps_clip=0.2)


def test_what_a_users_function_raises_names_the_option_and_the_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no median")

    args = Args(rollout_backend="own", hf_checkpoint=str(tmp_path), tokenizer=str(tmp_path), run_dir=str(tmp_path))
    write_model_folder(tmp_path)
    conversations = ChatReader(load_tokenizer(str(tmp_path)), "own")
    rewards, ids = torch.tensor([0.0, 1.0]), (np.array([0, 0]), np.array([0, 1]))
    batch: Any = SimpleNamespace(old=rewards, rollout_log_probs=rewards, where=())
    for registry, like, part, call in (
        (ESTIMATORS, "rloo", "group", lambda: group_advantages(rewards.numpy(), *ids, "own")),
        (LOSSES, "custom_loss", "function", lambda: micro_batch_loss(Args(loss_type="own"), batch, rewards, rewards)),
        (CORRECTIONS, "tis", "function", lambda: corrected(Args(correction="own"), batch, rewards)),
        (LOSS_MASKS, "auto", "find", lambda: conversations.tokens([])),
        (RULES, "reward_model", "scorer", lambda: Grader(RewardArgs(rm_type="own", reward_model_path="x"))),
        (ENGINES, "embedded", "build", lambda: EngineFactory(args).engine(0)),
    ):
        own = replace(registry[like], name="own", **{part: broken})
        monkeypatch.setitem(registry, "own", own)
        place = rf"{registry.option} own raised RuntimeError: no median \(.*test_registries.py, line \d+, in broken\)"
        with pytest.raises(PluginError, match=place):
            call()
    for reference in ("no.such.module:fn", "slimelite.base.registry:no_such_function"):
        with pytest.raises(ValueError, match=f"'{reference}' of a record is not a function"):
            function(reference)


def test_names_that_code_branches_on_take_no_others() -> None:
    for registry in (LEVELS, MODES, KL_KINDS, AGGREGATIONS, DPO_KINDS):
        with pytest.raises(ValueError, match=rf"{registry.option} does not accept a new {registry.what}"):
            registry.add(replace(next(iter(registry.values())), name="own"))  # type: ignore[attr-defined]
        assert "own" not in registry


def test_a_registered_loss_may_return_a_whole_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    batch: Any = SimpleNamespace()
    whole = Loss(torch.ones((), requires_grad=True), {})
    monkeypatch.setitem(LOSSES, "own", replace(LOSSES["custom_loss"], name="own", function=lambda *_: whole))
    assert micro_batch_loss(Args(loss_type="own"), batch, torch.ones(2), torch.ones(2)) is whole


@pytest.mark.parametrize("registry", [LOSSES, CORRECTIONS])
def test_a_record_without_a_function_is_refused_before_the_start(
    registry: Registry[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry, "own", replace(registry["policy_loss" if registry is LOSSES else "tis"], name="own"))
    with pytest.raises(ArgumentError, match=rf"{registry.option} own: its record has no function"):
        make_args(f"{RUN} {registry.option} own".split())
