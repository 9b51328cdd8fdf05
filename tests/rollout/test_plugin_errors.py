"""What a plugin raises, and a plugin that ends the process, are one message that names the plugin and its line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slimelite.base.guard import PluginError, raised_at
from slimelite.rollout import groups
from slimelite.slime.plugins import load_function

from .conftest import MakeArgs, MakeManager, plugin
from .scripted import ScriptedEngine

PLUGINS = """
import asyncio, os, sys
from slimelite.rollout.generate import generate_rollout

def fail(*args, **named):
    return {}["filter"]

def leave(*args, **named):
    sys.exit(0)

async def leave_awaited(args, sample, sampling_params):
    await asyncio.sleep(0)
    sys.exit(0)

async def leave_in_a_task(args, sample, sampling_params):
    await asyncio.gather(leave_awaited(args, sample, sampling_params), asyncio.sleep(0.01))

def rollout_of_ours(args, rollout_id, data_source, evaluation=False):
    return generate_rollout(args, rollout_id, data_source, evaluation)

def quit(*args, **named):
    os._exit(0)

async def quit_in_a_task(args, sample, sampling_params):
    async def later():
        await asyncio.sleep(0)
        os._exit(0)
    await asyncio.gather(later(), asyncio.sleep(0.01))

def fork(*args, **named):
    child = os.fork()
    if not child:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

class Source:
    def __init__(self, args): ...
    def __len__(self): return 1
    def add_samples(self, groups): ...
    def get_samples(self, n):
        sys.exit(0)

class Quits(Source):
    def get_samples(self, n):
        os._exit(0)

class Stillborn(Source):
    def __init__(self, args):
        sys.exit(0)
"""
# how a generate function fails is another matter: it is tried again
FLAGS = (
    "rollout_function_path",
    "dynamic_sampling_filter_path",
    "rollout_sample_filter_path",
    "rollout_all_samples_process_path",
    "custom_reward_post_process_path",
    "custom_rollout_log_function_path",
    "buffer_filter_path",
    "rollout_sample_hook_path",
)


@pytest.fixture
def plugins(tmp_path: Path) -> str:
    (tmp_path / "plugins.py").write_text(PLUGINS)
    return str(tmp_path / "plugins.py")


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("function", ["fail", "leave"])
def test_every_kind_of_plugin(
    make_args: MakeArgs, make_manager: MakeManager, plugins: str, flag: str, function: str
) -> None:
    path = f"{plugins}:{function}"
    value = [path] if flag == "rollout_sample_hook_path" else path
    manager = make_manager(make_args(**{flag: value}, over_sampling_batch_size=5), [ScriptedEngine()])
    what = r"raised KeyError: 'filter'" if function == "fail" else r"called sys\.exit\(0\)"
    option, line = "--" + flag.replace("_", "-"), 6 if function == "fail" else 9
    if flag == "buffer_filter_path":
        manager.generate(0)  # leaves groups to pick from
    with pytest.raises(PluginError, match=rf"^{option} {path} {what} \({plugins}, line {line}, in {function}\)$"):
        manager.generate(1)


@pytest.mark.parametrize("function", ["leave", "leave_awaited", "leave_in_a_task"])
def test_a_generate_function_that_ends_the_process(
    make_args: MakeArgs, make_manager: MakeManager, plugins: str, function: str
) -> None:
    """At once, not after all attempts; and the rollout's thread goes on."""
    path = f"{plugins}:{function}"
    manager = make_manager(make_args(custom_generate_function_path=path), [ScriptedEngine()])
    for _ in range(2):
        with pytest.raises(PluginError, match=rf"^the plugin {path} called sys\.exit\(0\) \({plugins}, line \d+"):
            manager.generate(0)


@pytest.mark.parametrize("name", ["Source", "Stillborn"])
def test_a_data_source_that_ends_the_process(
    make_args: MakeArgs, make_manager: MakeManager, plugins: str, name: str
) -> None:
    args = make_args(data_source_path=f"{plugins}:{name}")
    with pytest.raises(PluginError, match=rf"^--data-source-path {plugins}:{name}.* called sys\.exit\(0\)"):
        make_manager(args, [ScriptedEngine()]).generate(0)


@pytest.mark.parametrize("function", ["quit", "quit_in_a_task"])
def test_a_generate_function_that_calls_os_exit(
    make_args: MakeArgs, make_manager: MakeManager, plugins: str, function: str
) -> None:
    """os._exit(0) would end this process with success and without a word."""
    path = f"{plugins}:{function}"
    manager = make_manager(make_args(custom_generate_function_path=path), [ScriptedEngine()])
    what = rf"^the plugin {path} called os\._exit\(0\) \({plugins}, line \d+"
    with pytest.raises(PluginError, match=what) as told:
        manager.generate(0)
    assert raised_at(told.value) == "", "the message has the line already"


def test_a_data_source_that_calls_os_exit(make_args: MakeArgs, make_manager: MakeManager, plugins: str) -> None:
    args = make_args(data_source_path=f"{plugins}:Quits")
    with pytest.raises(PluginError, match=rf"^--data-source-path {plugins}:Quits.* called os\._exit\(0\)"):
        make_manager(args, [ScriptedEngine()]).generate(0)


def test_a_child_process_of_a_plugin_ends_as_it_wants(plugins: str) -> None:
    assert load_function(f"{plugins}:fork")() == 7


def test_our_own_messages_stay_what_they_are(make_args: MakeArgs, make_manager: MakeManager, plugins: str) -> None:
    args = make_args(rollout_function_path=f"{plugins}:rollout_of_ours", data_source_path=plugin("sources.py:Empty"))
    with pytest.raises(ValueError, match=r"^the data source returned no prompts"):
        make_manager(args, [ScriptedEngine()]).generate(0)


def test_a_generate_function_that_fails_is_tried_again(
    make_args: MakeArgs, make_manager: MakeManager, plugins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "RETRY_SECONDS", 0.0)
    manager = make_manager(make_args(custom_generate_function_path=f"{plugins}:fail"), [ScriptedEngine()])
    with pytest.raises(ValueError, match=r"4 groups in a row could not be generated by --custom-generate-f") as told:
        manager.generate(0)
    assert "the last error: KeyError('filter'" in str(told.value)
    assert str(told.value).endswith("in fail)")


def test_a_module_that_ends_the_process_when_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ValueError, match=r"script.py:main': it calls sys\.exit\(0\) while it is imported"):
        load_function(f"{tmp_path / 'script.py'}:main")
    (tmp_path / "quits.py").write_text("from os import _exit\n_exit(0)\n")
    with pytest.raises(ValueError, match=r"quits.py:main': it calls os\._exit\(0\) while it is imported"):
        load_function(f"{tmp_path / 'quits.py'}:main")


def test_a_loaded_function_is_what_it_was(plugins: str) -> None:
    """Signature, name and kind: callers look at them."""
    assert asyncio.iscoroutinefunction(load_function(f"{plugins}:leave_awaited"))
    assert not asyncio.iscoroutinefunction(load_function(f"{plugins}:leave", "--flag"))
    assert load_function(f"{plugins}:leave").__name__ == "leave"


@pytest.mark.parametrize("output", ["no", None, 0.5, ["no"], 2, (True, True)])
def test_a_filter_that_does_not_say_yes_or_no(
    make_args: MakeArgs, make_manager: MakeManager, tmp_path: Path, output: object
) -> None:
    (tmp_path / "filters.py").write_text(f"def choose(args, samples):\n    return {output!r}\n")
    args = make_args(dynamic_sampling_filter_path=f"{tmp_path}/filters.py:choose")
    with pytest.raises(ValueError, match=r"--dynamic-sampling-filter-path .*filters.py:choose returned .*True to keep"):
        make_manager(args, [ScriptedEngine()]).generate(0)


@pytest.mark.parametrize("output", ["True", "numpy.True_", "torch.tensor([1.0, 2.0]).std() > 0", "1"])
def test_a_filter_may_say_yes_in_any_numeric_library(
    make_args: MakeArgs, make_manager: MakeManager, tmp_path: Path, output: str
) -> None:
    (tmp_path / "filters.py").write_text(f"import numpy, torch\ndef choose(args, samples):\n    return {output}\n")
    args = make_args(dynamic_sampling_filter_path=f"{tmp_path}/filters.py:choose")
    assert len(make_manager(args, [ScriptedEngine()]).generate(0).table) == 12
