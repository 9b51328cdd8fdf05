"""Finding functions by path, and slime's names for ours."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest

from slimelite import compat
from slimelite.compat import SLIME_NAMES, SlimeSample
from slimelite.plugins import load_function
from slimelite.rollout import filters
from slimelite.sample import UNSTAMPED, Sample, Status

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
        ("{dir}/lacks_module.py:fn", "No module named 'no_such_dependency'"),
        ("slimelite.rollout.filterz.check_all", "did you mean filters?"),
        ("slimelite.rollout.filters.check_al", "did you mean check_all?"),
        ("no_such_package_at_all.fn", "No module named 'no_such_package_at_all'"),
        ("just_a_name", "write package.module.function or path/to/file.py:function"),
        ("slime.rollout.rm_hub.math_rm", "does not provide slime.rollout.rm_hub.math_rm; there it has .*async_rm"),
        ("slime.router.loss.fn", "does not provide slime.router; of slime it has .*slime.rollout.sft_rollout"),
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
    compat.install_finder()
    assert getattr(importlib.import_module(module), attribute) is found


def test_slimes_graders() -> None:
    grade = load_function("slime.rollout.rm_hub.math_utils.grade_answer_verl")
    assert grade(r"so \boxed{\frac{1}{2}}", "0.5") is True
    assert grade(r"so \boxed{(x+1)^2}", "x^2+2x+1") is True
    assert grade(r"so \boxed{3}", "0.5") is False
    deepscaler = load_function("slime.rollout.rm_hub.deepscaler.get_deepscaler_rule_based_reward")
    assert deepscaler(r"\boxed{1}</think>\boxed{2}", "2") == 1
    assert deepscaler(r"\boxed{2}", "2") == 0
    assert load_function("slime.rollout.rm_hub.math_dapo_utils.compute_score")("Answer: 7", "7")["score"] == 1.0


def test_slime_is_served_only_once_a_plugin_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("from slime.utils.types import Sample\ndef fn(): return Sample\n")
    code = f"""
import importlib.util
import slimelite.plugins
assert importlib.util.find_spec("slime") is None
fn = slimelite.plugins.load_function({str(tmp_path / "p.py")!r} + ":fn")
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
from slimelite.plugins import load_function
assert load_function("slime.mine")() == "real"
from slimelite.rollout import filters
name = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
assert load_function(name) is filters.check_reward_nonzero_std
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_checkout_named_slime_is_not_slime(tmp_path: Path) -> None:
    (tmp_path / "slime" / "docs").mkdir(parents=True)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from slimelite.plugins import load_function
load_function("slimelite.rollout.filters.check_all")
from slime.utils.types import Sample
assert Sample.__module__ == "slimelite.compat"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_both_ways_to_append_tokens() -> None:
    sample = SlimeSample(index=1, tokens=[7])
    sample.append_response_tokens([8], [-0.5], text="a")  # ours
    meta = {"finish_reason": {"type": "length"}, "weight_version": "4"}
    sample.append_response_tokens(object(), tokens=[9, 10], log_probs=[-1.0, -2.0], meta_info=meta, text="bc")
    sample.append_response_tokens(None, tokens=[11], trainable=False)
    assert sample.tokens == [7, 8, 9, 10, 11]
    assert sample.rollout_log_probs == [-0.5, -1.0, -2.0, 0.0]
    assert sample.loss_mask == [1, 1, 1, 0]
    assert sample.weight_versions == [UNSTAMPED, 4, 4, UNSTAMPED]
    assert (sample.response, sample.status) == ("abc", Status.TRUNCATED)
    with pytest.raises(ValueError, match="without log-probs"):
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
    sample = SlimeSample(tokens=[7])
    whole = {"finish_reason": {"type": "stop"}, **meta}
    sample.append_response_tokens(None, tokens=[8, 9, 10], log_probs=[-1.0] * 3, meta_info=whole)
    assert sample.weight_versions == versions


def test_a_slime_sample_is_a_copy_with_room_for_more() -> None:
    original = Sample(index=1, tokens=[1, 2], metadata={"a": [1]}, status=Status.ABORTED)
    copy = SlimeSample.copy_of(original)
    copy.turns = 3  # type: ignore[attr-defined]
    copy.metadata["a"].append(2)
    copy.tokens.append(3)
    assert (original.metadata, original.tokens) == ({"a": [1]}, [1, 2])
    assert deepcopy(copy).turns == 3
    assert isinstance(copy, Sample)
    assert copy.status is Status.ABORTED


def test_post_tries_again_while_there_is_nobody() -> None:
    import aiohttp

    async def scenario() -> None:
        with pytest.raises(aiohttp.ClientConnectionError):
            await compat.post("http://127.0.0.1:9/generate", {}, max_retries=1)

    asyncio.run(scenario())
