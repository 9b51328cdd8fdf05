"""``--help`` in its forms: short, of a group, of a flag, of a word; ``--help-all`` is in test_command_line.py."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from slimelite.apps.command import COMMANDS
from slimelite.apps.command import main as slimelite
from slimelite.arguments import Args, make_args, parse_args
from slimelite.arguments.flags import all_flags, group_flags, groups_of
from slimelite.arguments.help import EXAMPLE, USED, meaning, short_name, usage
from slimelite.plan.devices import Machine

ROOT = Path(__file__).parents[2]
EVERY = all_flags(Args)


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_args(argv)
    assert ended.value.code == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_args(argv)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_help_is_short_and_says_how_to_find_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    used = [name for names in USED.values() for name in names]
    assert 35 <= len(used) <= 45
    assert len(set(used)) == len(used)
    text = said(capsys, "--help")
    for name in used:
        assert f"\n  {usage(EVERY[name])}" in text
    for group in groups_of(Args):
        assert f"\n  {short_name(group)} " in text
    lines = text.replace(EXAMPLE, "").splitlines()
    assert len(lines) < 140
    assert max(map(len, lines)) <= 100
    assert "--help-all | grep WORD" in lines[-1]
    assert said(capsys, "--lr", "1e-4", "-h") == text


def test_help_takes_no_time_and_loads_nothing_heavy() -> None:
    """Next to no time is at most half of what the import of torch takes, in the same process."""
    code = (
        "import sys, time\nfrom slimelite.arguments import parse_args\n"
        "try: parse_args(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'numpy', 'pyarrow', 'rich', 'yaml') if m in sys.modules])\n"
        "used = time.process_time()\nimport torch\nprint(used, time.process_time() - used)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    *_, heavy, seconds = done.stdout.splitlines()
    assert heavy == "[]"
    shown, torch_imported = map(float, seconds.split())
    assert shown < torch_imported / 2


@pytest.mark.parametrize("group", groups_of(Args), ids=short_name)
def test_a_group_by_its_short_name(group: type, capsys: pytest.CaptureFixture[str]) -> None:
    shown = [line for line in said(capsys, "--help", short_name(group)).splitlines() if line.startswith("  --")]
    assert shown == [f"  {usage(flag)}".splitlines()[0] for flag in group_flags(group)]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--lr"], "--lr FLOAT Peak learning rate. The value must be at least 0. The flag needs training. Default: 1"),
        (["lr"], "--lr FLOAT Peak learning rate"),
        (["eps_clip"], "--eps-clip FLOAT The ratio of new to old policy"),
        (["--tis-level"], "--mis-level, --tis-level"),
        (["--no-colocate"], "--colocate Training and inference share the GPUs"),
        (["--disable-rewards-normalization"], "--disable-rewards-normalization Rewards are not normalized"),
        (["--sglang-dtype"], "--sglang-dtype This option of SGLang is passed to every SGLang server"),
        (["--fp16"], "--fp16 This flag is refused: there is no loss scaler; "),
        (["--sequence-parallel"], "--sequence-parallel This flag is accepted, but has no effect here: this flag is"),
    ],
)
def test_one_flag(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert " ".join(said(capsys, "--seed", "3", "--help", *argv).split()).startswith(text)


def test_a_word_finds_the_flags_that_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    shown = [line for line in said(capsys, "--help", "kl").splitlines() if line.startswith("  --")]
    assert shown == [f"  {usage(flag)}" for flag in EVERY.values() if "kl" in flag.option]
    assert len(shown) > 5


def test_a_misspelt_topic_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    for topic, meant in (("optimzer", "optimizer"), ("rewards", "reward"), ("--use-kl-los", "--use-kl-loss")):
        expected = f"train.py: --help {topic}: there is no group or flag with this name; did you mean {meant}?\n"
        assert refused(capsys, "--help", topic) == expected
    assert "groups are cluster, architecture, model, " in refused(capsys, "--help", "qqq")


def test_a_command_line_that_goes_on_after_help_is_no_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--help", "--lr", "1e-4") == said(capsys, "--help")


def test_head_may_close_the_pipe() -> None:
    command = f"{sys.executable} train.py --help-all | head -1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout == "usage: train.py --flag value ...\n"
    assert done.stderr == ""


def commands(text: str, program: str) -> list[list[str]]:
    """The command lines of ``program`` in a text, as words; two spaces end one and begin what it does."""
    lines = text.replace("\\\n", "").splitlines()
    found = [line.partition(program)[2].strip() for line in lines if re.match(rf"( *|example: ){program} ", line)]
    return [
        shlex.split(re.sub(r" {6,}", " ", line) if program != "slimelite" else line.partition("  ")[0])
        for line in found
    ]


def test_the_example_is_a_complete_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = commands(EXAMPLE, "python train.py")
    assert EXAMPLE in said(capsys, "--help")
    assert make_args(words, machine=Machine(gpus=0)).dry_run


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_examples_of_every_command_are_understood(
    command: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # there are none of the runs
    with suppress(SystemExit):
        slimelite([*([command] if command else []), "--help"])
    examples = commands(capsys.readouterr().out, "slimelite")
    assert len(examples) >= 1 or command in ("serve", "eval", "train", "env", "completion", "doctor"), "they have none"
    for words in examples:
        with suppress(SystemExit):
            slimelite(words)
        answer = capsys.readouterr().err
        assert "usage:" not in answer, words  # argparse shows it with its complaints


def test_several_conditions_are_numbered_and_alternatives_have_letters() -> None:
    kl, url, text = (meaning(EVERY[name]) for name in ("kl_loss_type", "rm_url", "text_key"))
    assert kl.endswith(
        "needs (1) training, (2) --loss-type policy_loss or custom_loss "
        "and (3) a KL coefficient above 0 or --log-ref-kl."
    )
    assert (
        "(2) one of these: (a) --rm-type remote_rm or boxed_remote_rm; (b) --use-opd --opd-type sglang; (c) a " in url
    )
    assert text.endswith("needs --loss-type pretrain_loss or --eval-bpb.")


def test_a_switch_that_turns_off_says_what_is_off() -> None:
    for flag in EVERY.values():
        if flag.negative:
            assert re.search(r"\b(no|not)\b", re.split("[:;]", flag.help)[0]), flag.negative
