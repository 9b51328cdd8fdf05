"""Groups: typed fields, composed by inheritance; users bring their own."""

from __future__ import annotations

import ast
import pickle
import re
from dataclasses import FrozenInstanceError, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pytest

from slimelite.arguments import Args, ArgumentError, flag, make_args, parse_args
from slimelite.arguments.flags import Condition, Needs, all_flags, group_flags, group_title, groups_of
from slimelite.base.registry import Registry
from tests.arguments.conftest import COMPLETE, CPU


@dataclass(frozen=True)
class ShoutArgs:
    """Shouting.

    What my reward function reads.
    """

    shout_bonus: float = flag(0.5, "reward added for an exclamation mark")
    shout_words: list[str] = flag([], "words that count as shouting")
    shout_style: Literal["loud", "louder"] | None = flag(None, "how loud")
    shout_always: bool = flag(False, "shout at every token")


def test_custom_group(tmp_path: Any) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("shout_style: louder\nshout_bonus: 1e-2")
    words = [*COMPLETE.split(), "--shout-bonus", "0.7", "--shout-words", "hey", "ho", "--config", str(config)]
    args = make_args(words, groups=[ShoutArgs], machine=CPU)
    assert isinstance(args, Args)
    assert isinstance(args, ShoutArgs)
    assert (args.shout_bonus, args.shout_words, args.shout_style, args.shout_always) == (
        0.7,
        ["hey", "ho"],
        "louder",
        False,
    )
    assert args.global_batch_size == 8


def test_custom_group_is_as_strict() -> None:
    with pytest.raises(ArgumentError) as caught:
        make_args([*COMPLETE.split(), "--shout-style", "soft", "--shout-bonsu", "1"], groups=[ShoutArgs], machine=CPU)
    assert caught.value.problems == [
        "--shout-style must be one of loud, louder, not 'soft'",
        "--shout-bonsu is not a known flag; did you mean --shout-bonus?",
    ]


def test_custom_group_has_a_help_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        parse_args(["--help"], groups=[ShoutArgs])
    text = capsys.readouterr().out
    assert exit.value.code == 0
    section = text[text.index("\nSHOUTING\n") :]
    assert "What my reward function reads." in section
    assert "--shout-style {loud,louder}" in section
    assert "Default: 0.5." in section
    assert "--lr FLOAT" not in section


SINGS = Condition("a voice", lambda args: args.voice != "auto")


@dataclass(frozen=True)
class Voice:
    """A record."""

    name: str


VOICES: Registry[Voice] = Registry("voice", "--voice")
VOICES.add(Voice("alto"))


@dataclass(frozen=True)
class VoiceArgs:
    """Voices."""

    voice: str = flag("auto", "this voice sings", choices=("auto", VOICES))
    pitch: float = flag(440.0, "it sings at this pitch", above=0, below=20_000, needs=Needs((SINGS,)))
    choir: list[int] = flag([], "these many sing each part", at_least=1)
    encore: int | None = flag(None, "it sings this often again", needs=Needs((SINGS,)).strictly())


def test_a_flag_says_its_choices_bounds_and_needs(capsys: pytest.CaptureFixture[str]) -> None:
    def read(words: str) -> Args:
        return make_args([*COMPLETE.split(), *words.split()], groups=[VoiceArgs], machine=CPU)

    def problems(words: str) -> list[str]:
        with pytest.raises(ArgumentError) as caught:
            read(words)
        return caught.value.problems

    assert problems("--voice bass") == [
        "--voice must be one of auto, alto, not 'bass'; a file of --import-file adds a name of your own"
    ]
    VOICES.add(Voice("bass"))
    assert read("--voice bass").voice == "bass"
    assert problems("--pitch 20000") == ["--pitch 20000.0: must be above 0 and below 20000"]
    assert problems("--choir 2 0") == ["--choir [2, 0]: must be at least 1"]
    assert problems("--encore 1") == ["--encore needs a voice"]
    assert read("--voice alto --encore 1").no_effect == ()
    assert read("--pitch 220").no_effect == (("--pitch", "needs a voice"),)
    with pytest.raises(SystemExit):
        parse_args(["--help"], groups=[VoiceArgs])
    text = " ".join(capsys.readouterr().out.split())
    assert "--voice {auto,alto,bass} This voice sings. Default: auto." in text
    assert (
        "--pitch FLOAT It sings at this pitch. The value must be above 0 and below 20000. The flag needs a voice. "
        "Default: 440." in text
    )


def test_two_groups_of_the_same_flag_name_the_clash() -> None:
    @dataclass(frozen=True)
    class Again:
        """Again."""

        lr: float = flag(0.5, "my own")

    with pytest.raises(ArgumentError, match="--lr"):
        make_args(COMPLETE.split(), groups=[Again], machine=CPU)


def test_a_flag_that_hides_an_attribute_of_the_arguments_is_refused() -> None:
    @dataclass(frozen=True)
    class Hides:
        """Hides."""

        job: str | None = flag(None, "which job of the queue")

    with pytest.raises(ArgumentError, match="--job: the arguments already have an attribute of this name"):
        make_args(COMPLETE.split(), groups=[Hides], machine=CPU)


def test_every_group_stands_alone_with_defaults() -> None:
    assert len(groups_of(Args)) >= 15
    for group in groups_of(Args):
        values = group()
        with pytest.raises(FrozenInstanceError):
            setattr(values, fields(group)[0].name, 1)


def test_every_flag_belongs_to_one_group_and_says_something() -> None:
    seen: set[str] = set()
    for group in groups_of(Args):
        assert group_title(group)[0]
        for f in group_flags(group):
            assert f.name not in seen
            assert f.help
            seen.add(f.name)
    assert seen == set(all_flags(Args))


def test_defaults_are_not_shared() -> None:
    first, second = Args(), Args()
    first.prompt_data.append("x")
    assert second.prompt_data == []


def test_arguments_travel_between_processes() -> None:
    args = make_args(COMPLETE.split(), machine=CPU)
    assert pickle.loads(pickle.dumps(args)) == args


def test_what_is_open_by_default_is_resolved_after_parsing() -> None:
    """A field annotated without None is not None once parsing is done (a few are filled in when the run starts)."""
    at_start = {"num_rollout", "start_rollout_id"}
    args = make_args([*COMPLETE.split(), "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64"], machine=CPU)
    open_fields = {f.name for f in all_flags(Args).values() if f.default is None and not f.optional} - at_start
    assert {"device", "global_batch_size", "num_steps_per_rollout", "run_dir", "eps_clip_high"} <= open_fields | {
        "device"
    }
    assert [name for name in sorted(open_fields) if getattr(args, name) is None] == []


def test_conditions_read_arguments_that_exist() -> None:
    """A type checker does not see it: a condition stands below the groups whose flags it reads."""
    args, read = make_args(COMPLETE.split(), machine=CPU), set[str]()
    for file in (Path(__file__).parents[2] / "slimelite" / "arguments").glob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "when":
                read.update(re.findall(r"\ba\.(?:job\.)?\w+", ast.unparse(call.args[1])))
    assert len(read) > 40
    assert [name for name in read if not hasattr(args.job if ".job." in name else args, name.split(".")[-1])] == []
