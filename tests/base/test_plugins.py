"""Finding functions by path, and slime's names for ours."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import pickle
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.lib.arithmetic import build_tokenizer
from slimelite.rollout import filters
from slimelite.samples.sample import UNSTAMPED, Sample, Status
from slimelite.slime import functions as slime_functions
from slimelite.slime.plugins import SLIME_NAMES, install_finder, load_function

PLUGIN = """
import neighbour
LOADED = []
LOADED.append(1)
NUMBER = 3

def reward(args, sample):
    return neighbour.VALUE + len(LOADED)
"""


@pytest.fixture
def plugin_file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("VALUE = 41\n")
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    (tmp_path / "lacks_module.py").write_text("import no_such_dependency\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    return tmp_path / "my_plugin.py"


def test_functions_of_packages_and_of_files(plugin_file: Path) -> None:
    assert load_function("slimelite.rollout.filters.check_all") is filters.check_all
    assert load_function("slimelite.rollout.filters:check_all") is filters.check_all
    reward = load_function(f"{plugin_file}:reward")
    assert reward(None, None) == 42
    assert load_function(f"{plugin_file}:reward")(None, None) == 42  # loaded once


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{dir}/my_plugin.py:rewad", "no 'rewad'; did you mean reward?"),
        ("{dir}/my_plugn.py:reward", "no plugin file .*my_plugn.py; did you mean my_plugin.py?"),
        ("{dir}/my_plugin.py:NUMBER", "is a int, not a function"),
        ("{dir}/my_plugin.py", "names a file, but not a function or class in the file: write .*/my_plugin.py:name"),
        ("{dir}/lacks_module.py:fn", "No module named 'no_such_dependency'"),
        ("slimelite.rollout.filterz.check_all", "did you mean slimelite.rollout.filters?"),
        ("slimelite.rollout.filters.check_al", "did you mean check_all?"),
        ("no_such_package_at_all.fn", "No module named 'no_such_package_at_all'; write path/to/file.py:function"),
        ("examples.reward.fn", "No module named 'examples'; write path/to/file.py:function, or add the folder"),
        ("just_a_name", "write package.module.function or path/to/file.py:function"),
        ("slime.rollout.rm_hub.math_rm", "does not provide slime.rollout.rm_hub.math_rm; it provides .*async_rm"),
        (
            "slime.router.loss.fn",
            "does not provide slime.router; it provides these modules of slime: .*slime.rollout.sft_rollout",
        ),
    ],
)
def test_what_cannot_be_loaded_is_said(plugin_file: Path, path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_function(path.format(dir=plugin_file.parent))


def test_errors_of_a_plugins_own_code_are_its_own(plugin_file: Path) -> None:
    for _ in range(2):  # a file that failed is not half loaded
        with pytest.raises(ZeroDivisionError):
            load_function(f"{plugin_file.parent / 'raises.py'}:fn")


@pytest.mark.parametrize("name", sorted(SLIME_NAMES))
def test_every_slime_name_is_something_of_ours(name: str) -> None:
    found = load_function(name)
    module, _, attribute = name.rpartition(".")
    install_finder()
    assert getattr(importlib.import_module(module), attribute) is found


def test_slimes_graders() -> None:
    grade = load_function("slime.rollout.rm_hub.math_utils.grade_answer_verl")
    assert grade(r"so \boxed{\frac{1}{2}}", "0.5") is True
    assert grade(r"so \boxed{(x+1)^2}", "x^2+2x+1") is True
    assert grade(r"so \boxed{3}", "0.5") is False
    deepscaler = load_function("slime.rollout.rm_hub.deepscaler.get_deepscaler_rule_based_reward")
    assert deepscaler(r"\boxed{1}</think>\boxed{2}", "2") == 1
    assert deepscaler(r"\boxed{2}", "2") == 0
    dapo = "slime.rollout.rm_hub.math_dapo_utils"
    score = load_function(f"{dapo}.compute_score")
    assert score("Answer: 7", "7")["score"] == score("Answer: 7", 7)["score"] == 1.0
    assert score(r"so \boxed{7}", 7, strict_box_verify=True) == {"score": 1.0, "acc": True, "pred": "7"}
    assert load_function(f"{dapo}.is_correct_minerva")("Answer: 7", r"\boxed{7}", gt_need_extract=True) == (True, "7")
    assert load_function(f"{dapo}.is_correct_strict_box")(r"\boxed{8}", "7") == (-1, "8")
    gpqa = load_function("slime.rollout.rm_hub.gpqa.compute_gpqa_reward")
    assert gpqa("The answer is (B).", 1, {"choices": ["x", "y"]}) == 1.0
    assert gpqa("The answer is (A).", "B") == 0.0
    assert gpqa(None, "B") == 0.0
    assert load_function("slime.rollout.rm_hub.math_utils._strip_string")(r"x = \dfrac12") == r"\frac{1}{2}"
    assert load_function("slime.rollout.rm_hub.f1.normalize_answer")("The Cat!") == "cat"


def test_slimes_traces_record_nothing() -> None:
    span, decorated = (load_function(f"miles.observability.trace_utils.{n}") for n in ("trace_span", "trace_function"))
    meta = load_function("slime.observability.trace_utils.build_sglang_meta_trace_attrs")

    @decorated("tool", target="sample")
    async def tool(sample: Sample) -> str:
        with span(sample, "search", attrs={"k": 3}) as inner:
            inner.update(meta({"prompt_tokens": 7, "finish_reason": {}}))
        return f"{inner['k']} {inner['prompt_tokens']}"

    assert asyncio.run(tool(Sample())) == "3 7"
    with pytest.raises(ZeroDivisionError), span([], "x"):
        _ = 1 / 0


def test_what_rollout_functions_return_becomes_an_object() -> None:
    call_rollout_fn = load_function("slime.rollout.base_types.call_rollout_fn")
    groups = [[Sample(index=0)]]
    assert call_rollout_fn(lambda _args, _id, evaluation: groups, None, 0, evaluation=False).samples is groups
    output = call_rollout_fn(lambda _args, _id, evaluation: {"aime": {"rewards": [1]}}, None, 0, evaluation=True)
    assert output.data == {"aime": {"rewards": [1]}}
    assert call_rollout_fn(lambda evaluation: output, evaluation=True) is output


def test_slime_is_served_only_once_a_plugin_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("from slime.utils.types import Sample\ndef fn(): return Sample\n")
    code = f"""
import importlib.util
import slimelite.slime.plugins
assert importlib.util.find_spec("slime") is None
fn = slimelite.slime.plugins.load_function({str(tmp_path / "p.py")!r} + ":fn")
import slime.utils.types
assert fn() is slime.utils.types.Sample
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_installed_slime_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").write_text("def mine(): return 'real'\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from slimelite.slime.plugins import load_function
assert load_function("slime.mine")() == "real"
from slimelite.rewards.math import remove_boxed
assert load_function("slime.rollout.rm_hub.math_utils.remove_boxed") is remove_boxed
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_checkout_named_slime_is_not_slime(tmp_path: Path) -> None:
    (tmp_path / "slime" / "docs").mkdir(parents=True)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from slimelite.slime.plugins import load_function
load_function("slimelite.rewards.math.remove_boxed")
from slime.utils.types import Sample
assert Sample.__module__ == "slimelite.samples.sample"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_both_ways_to_append_tokens() -> None:
    sample = Sample(index=1, tokens=[7])
    sample.append_response_tokens([8], [-0.5], text="a")  # ours
    meta = {"finish_reason": {"type": "length"}, "weight_version": "4"}
    sample.append_response_tokens(object(), tokens=[9, 10], log_probs=[-1.0, -2.0], meta_info=meta, text="bc")
    sample.append_response_tokens(None, tokens=[11], trainable=False)
    assert sample.tokens == [7, 8, 9, 10, 11]
    assert sample.rollout_log_probs == [-0.5, -1.0, -2.0, 0.0]
    assert sample.loss_mask == [1, 1, 1, 0]
    assert sample.weight_versions == [UNSTAMPED, 4, 4, UNSTAMPED]
    assert (sample.response, sample.status) == ("abc", Status.TRUNCATED)
    with pytest.raises(ValueError, match="have no log-probs"):
        sample.append_response_tokens(None, tokens=[12])


@pytest.mark.parametrize(
    ("meta", "versions"),
    [
        ({"weight_version": "4"}, [4, 4, 4]),
        ({"weight_version": "default"}, [UNSTAMPED] * 3),
        ({}, [UNSTAMPED] * 3),
        (
            {"weight_version": "4", "weight_versions": [{"version": "3", "start": 0}, {"version": "4", "start": 2}]},
            [3, 3, 4],
        ),
        # the answer was longer than what the plugin took of it
        ({"weight_versions": [{"version": "3", "start": 0}, {"version": "4", "start": 7}]}, [3, 3, 3]),
    ],
)
def test_weight_versions_of_an_answer(meta: dict[str, object], versions: list[int]) -> None:
    sample = Sample(tokens=[7])
    whole = {"finish_reason": {"type": "stop"}, **meta}
    sample.append_response_tokens(None, tokens=[8, 9, 10], log_probs=[-1.0] * 3, meta_info=whole)
    assert sample.weight_versions == versions


def test_attributes_of_a_plugins_own_stay_on_a_sample() -> None:
    original = Sample(index=1, tokens=[1, 2], metadata={"a": [1]}, status=Status.ABORTED)
    original.turns = 3  # type: ignore[attr-defined]
    for made in (Sample.from_dict(original.to_dict()), deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert made == original
        assert (made.turns, made.status) == (3, Status.ABORTED)
        made.metadata["a"].append(2)
        made.tokens.append(3)
    assert (original.metadata, original.tokens) == ({"a": [1]}, [1, 2])


def test_a_list_of_the_mask_that_a_plugin_keeps_goes_on() -> None:
    """slime's retool example empties the mask, keeps the list, and puts it back at the end."""
    sample = Sample(tokens=[7])
    mask: list[int] = []
    sample.loss_mask = mask
    sample.append_response_tokens([8, 9], [-1.0, -2.0])
    sample.append_response_tokens(None, tokens=[10], trainable=False)
    assert mask == [1, 1, 0]
    sample.loss_mask = []
    with pytest.raises(ValueError, match="loss_mask has 0 entries but the response has 3"):
        sample.check_aligned()


def test_what_slimes_constructor_takes() -> None:
    sample = Sample(prompt="q", multimodal_inputs={"images": None, "videos": []}, rollout_routed_experts=None)
    assert sample.multimodal_train_inputs is None
    assert replace(sample, prompt="r").prompt == "r"
    with pytest.raises(ValueError, match="multimodal_inputs is not empty, but images"):
        Sample(multimodal_inputs={"images": ["cat.png"]})
    sample.multimodal_train_inputs = {"pixel_values": [1.0]}
    with pytest.raises(ValueError, match="multimodal_train_inputs is not empty"):
        sample.check_aligned()
    with pytest.raises(TypeError, match="imagez"):
        Sample(imagez=[])  # type: ignore[call-arg]


def test_post_tries_again_while_there_is_nobody() -> None:
    async def scenario() -> None:
        with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9/generate does not answer"):
            await slime_functions.post("http://127.0.0.1:9/generate", {}, max_retries=1)

    asyncio.run(scenario())


def test_slimes_data_set_and_masks(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    file = tmp_path / "rows.jsonl"
    rows = [{"text": f"{i}+1=?", "label": {"sum": i + 1}} for i in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = load_function("slime.utils.data.read_file")
    assert list(read(f"{file}@[1:3]")) == rows[1:3]
    make = load_function("slime.utils.data.Dataset")
    data = make(str(file), tokenizer, None, None, prompt_key="text", label_key="label", seed=1)
    assert [(s.prompt, s.label) for s in data.samples] == [(row["text"], row["label"]) for row in rows]
    data.shuffle(0)
    assert len(data) == 4
    assert sorted(s.label["sum"] for s in data.samples) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="images"):
        make(str(file), tokenizer, multimodal_keys={"image": "images"})

    masks = load_function("slime.utils.mask_utils.MultiTurnLossMaskGenerator")(tokenizer, tokenizer_type="qwen")
    messages = [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "#### 2"}]
    ids, mask = masks.get_loss_mask(messages)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    assert masks.get_text_from_loss_mask(ids, mask)[0].startswith("#### 2<|im_end|>")
    assert masks.get_response_lengths([mask, [0, 1, 0]]) == [sum(mask), 2]


def test_sample_hooks_reach_every_sample(tmp_path: Path) -> None:
    (tmp_path / "hook.py").write_text("async def mark(args, sample, evaluation):\n    sample.mark = evaluation\n")
    args = argparse.Namespace(rollout_sample_hook_path=[f"{tmp_path / 'hook.py'}:mark"])
    hooks = load_function("slime.rollout.sample_hooks.apply_rollout_sample_hooks")
    nested = asyncio.run(hooks(args, [Sample(index=0), [Sample(index=1)]], evaluation=True, rollout_id=3))
    assert (nested[0].mark, nested[1][0].mark) == (True, True)
