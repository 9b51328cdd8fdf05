"""The texts of ``--help`` (the usual flags, one group or one flag) and of ``--help-all`` (every flag)."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches

from slimelite.arguments.args import Args
from slimelite.arguments.flags import (
    ALWAYS,
    ArgumentError,
    Flag,
    all_flags,
    group_flags,
    group_title,
    groups_of,
    is_compound,
    listed,
)
from slimelite.arguments.sources import SIMILAR, Vocabulary, known_flags, sglang_options

INTRODUCTION = """\
usage: train.py --flag value ...

If a flag is given twice, the last one wins. --no-<switch> turns a switch off. --config FILE reads the same names from
a YAML file. See docs/arguments.md."""
EXAMPLE = """\
  python train.py --hf-checkpoint Qwen/Qwen2.5-0.5B-Instruct --prompt-data train.parquet --input-key messages \\
      --label-key label --apply-chat-template --rm-type math --num-rollout 100 --rollout-batch-size 32 \\
      --n-samples-per-prompt 8 --rollout-max-response-len 1024 --colocate --dry-run"""
# the flags that ``--help`` lists, because people use them most
USED = {
    "model and checkpoints": ("hf_checkpoint", "ref_load", "load", "save", "save_interval", "save_hf"),
    "prompts and batches": (
        *("prompt_data", "input_key", "label_key", "apply_chat_template"),
        *("num_rollout", "rollout_batch_size", "n_samples_per_prompt", "global_batch_size"),
    ),
    "responses": (
        *("rollout_max_response_len", "rollout_temperature", "dynamic_sampling_filter_path"),
        *("custom_generate_function_path", "async_rollout"),
    ),
    "reward": ("rm_type", "custom_rm_path", "reward_key"),
    "learning": ("preset", "advantage_estimator", "eps_clip", "use_kl_loss", "kl_loss_coef", "lr"),
    "evaluation": ("eval_interval", "eval_prompt_data", "n_samples_per_eval_prompt"),
    "machine": (
        *("actor_num_gpus_per_node", "rollout_num_gpus", "colocate"),
        *("use_dynamic_batch_size", "max_tokens_per_gpu", "gradient_checkpointing"),
    ),
    "this run": ("run_dir", "use_wandb", "seed", "config", "dry_run", "plan_gpu"),
}
# column at which the text of a flag begins in ``--help``
TEXT_AT = 34
PLACEHOLDERS = {int: "INT", float: "FLOAT", str: "TEXT", dict: "JSON"}


def is_asked(argv: Sequence[str]) -> bool:
    """Whether a command line asks for help."""
    return not {"-h", "--help", "--help-all"}.isdisjoint(argv)


def help_text(args_type: type, argv: Sequence[str]) -> str:
    """The help that ``argv`` asks for, wrapped to the width of the terminal, at most 120 columns.

    ``--help-all``: every flag. ``--help reward``: a group of flags. ``--help lr``, or ``--help --lr`` at the end: a
    flag. ``--help kl``: every flag whose name contains these letters. ``--help`` without a word after it: the flags
    that people use most.

    Raises:
        ArgumentError: there is no such group or flag.
    """
    width = min(shutil.get_terminal_size().columns, 120)
    if "--help-all" in argv:
        return _everything(args_type, width)
    place = min(argv.index(word) for word in ("-h", "--help") if word in argv)
    topic = argv[place + 1] if place + 1 < len(argv) else ""
    if topic.startswith("--") and place + 2 < len(argv):
        topic = ""  # the command line continues after --help
    return _about(args_type, topic, width) if topic else _short(args_type, width)


def short_name(group: type) -> str:
    """The name of a group after ``--help``, such as weight-sync for WeightSyncArgs."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", group.__name__.removesuffix("Args")).lower()


def _short(args_type: type, width: int) -> str:
    flags, groups = all_flags(args_type), groups_of(args_type)
    own = [group for group in groups if group not in groups_of(Args)]
    count = f"{sum(map(len, USED.values()))} of {len(flags)}"
    parts = [
        f"usage: train.py --flag value ...\n\nThese are the flags that people use most, {count}. An example:\n{EXAMPLE}"
    ]
    for title, names in USED.items():
        used = [flags[name] for name in names]
        lines = [_line(usage(flag), _sentence(flag) + _default(flag), width, most=2) for flag in used]
        parts.append("\n".join([title.upper(), *lines]))
    parts += [_section(group, width) for group in own]
    lines = [_line(short_name(group), _contents(group), width, at=16, most=1) for group in groups]
    parts.append("\n".join(["GROUPS OF FLAGS, FOR --help GROUP", *lines]))
    ways = {
        "train.py --help reward": "every flag of a group",
        "train.py --help --lr": "one flag",
        "train.py --help kl": "every flag with kl in its name",
        "train.py --help-all | grep WORD": "all flags; docs/arguments.md lists them too",
    }
    parts.append("\n".join(["TO FIND A FLAG", *(_line(how, what, width) for how, what in ways.items())]))
    return "\n\n".join(parts)


def _about(args_type: type, topic: str, width: int) -> str:
    """Help about a group, a flag, or the flags with ``topic`` in their names."""
    groups = {short_name(group): group for group in groups_of(args_type)}
    vocabulary = Vocabulary(args_type)
    name = topic.removeprefix("--").replace("_", "-").lower()
    flag = vocabulary.switches_on.get(name) or vocabulary.switches_off.get(name)
    if name in groups and not topic.startswith("--"):
        return _section(groups[name], width)
    if flag is not None:
        return _entry(flag, (), width)
    if name in known_flags():
        known = known_flags()[name]
        what = "This flag is refused" if known.refused else "This flag is accepted, but has no effect here"
        why = f"{what}: {known.why}."
        return _line(f"--{name}", why, width)
    if name.removeprefix("sglang-") in sglang_options() and name.startswith("sglang-"):
        return _line(f"--{name}", "This option of SGLang is passed to every SGLang server of the run.", width)
    near = get_close_matches(name, groups, 1, 0.8)
    alike = [flag for flag in all_flags(args_type).values() if name in (flag.negative or flag.option)]
    if alike and not near and not topic.startswith("--"):
        return "\n".join([f'FLAGS WITH "{topic}" IN THEIR NAMES', *(_entry(flag, (), width) for flag in alike)])
    near += filter(None, [vocabulary.nearest("--" + name)])
    near += get_close_matches(name, groups, 1, SIMILAR)
    meant = f"did you mean {near[0]}?" if near else f"the groups are {', '.join(groups)}; --help-all lists every flag"
    raise ArgumentError([f"--help {topic}: there is no group or flag with this name; {meant}"])


def _everything(args_type: type, width: int) -> str:
    parts = [INTRODUCTION, *(_section(group, width) for group in groups_of(args_type))]
    parts.append(_names("Known, without effect here", known_flags(refused=False), width))
    parts.append(_names("Known, and refused with the reason and what to use instead", known_flags(refused=True), width))
    return "\n\n".join(parts)


def _section(group: type, width: int) -> str:
    """Every flag of a group."""
    shared = shared_needs(group)
    lines = [group_title(group)[0].upper()]
    lines += textwrap.wrap(description(group), width, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines + [_entry(flag, shared, width) for flag in group_flags(group)])


def _sentence(flag: Flag) -> str:
    return flag.help[:1].upper() + flag.help[1:].rstrip(".") + "."


def _default(flag: Flag) -> str:
    default = shown_default(flag)
    return f" Default: {default}." if default else ""


def _contents(group: type) -> str:
    return f"{group_title(group)[0]}: " + " ".join(flag.negative or flag.option for flag in group_flags(group))


def _line(name: str, text: str, width: int, *, at: int = TEXT_AT, most: int | None = None) -> str:
    """A line of help: ``name``, then ``text`` from column ``at`` on. The text is cut after ``most`` lines."""
    lines = textwrap.wrap(text, max(width - at, 30), max_lines=most, placeholder=" …", break_on_hyphens=False)
    first = f"  {name} ".ljust(at)
    if len(first) > at:
        lines, first = ["", *lines], first.rstrip()
    return "\n".join([first + lines[0], *(" " * at + line for line in lines[1:])])


def _names(title: str, names: Iterable[str], width: int) -> str:
    listed = " ".join(sorted({"--router-..." if name.startswith("router-") else f"--{name}" for name in names}))
    indent = "  "
    wrapped = textwrap.wrap(listed, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join([title.upper(), *wrapped])


def usage(flag: Flag) -> str:
    """How the flag is written: ``--lr FLOAT``, or ``--mis-level, --tis-level TEXT`` if it has an alias.

    A long list of choices is wrapped.
    """
    option = ", ".join((flag.option, *flag.aliases))
    if flag.kind is bool:
        both = flag.default is not False and flag.negative is None
        return f"{option} / {flag.off_option}" if both else (flag.negative or option)
    value = "{" + ",".join(flag.choices) + "}" if flag.choices else flag.metavar or PLACEHOLDERS[flag.kind]
    words = f"{option} {value}" + (" ..." if flag.many else "")
    if not flag.choices:
        return words
    inside = " " * (
        len(option) + 4
    )  # continuation lines begin below the first choice; the list itself is indented by two
    return textwrap.fill(words.replace(",", ", "), 96, subsequent_indent=inside).replace(", ", ",")


def shown_default(flag: Flag) -> str:
    """The default as text, or "" if the default would not help the reader."""
    if flag.auto is not None:
        return flag.auto
    if flag.default in (None, [], {}, False) or flag.kind is bool:
        return ""
    return f"{flag.default:g}" if isinstance(flag.default, float) else str(flag.default)


def shared_needs(group: type) -> set[str]:
    """The conditions that all flags of ``group`` need. ``--help`` prints these conditions once for the group."""
    needs = [flag.needs or ALWAYS for flag in group_flags(group)]
    return set.intersection(*({condition.words for condition in need.conditions} for need in needs))


def description(group: type) -> str:
    """The text below the title of a group."""
    shared = shared_needs(group)
    needs = f" The flags of this section need {_together(sorted(shared))}." if shared else ""
    return f"{group_title(group)[1]}{needs}".strip()


def meaning(flag: Flag, shared: Collection[str] = ()) -> str:
    """The effect of a flag, its bounds, and its conditions that are not in ``shared``."""
    sentences = [_sentence(flag)]
    if flag.bounds:
        sentences.append(f"The value must be {flag.bounds}.")
    needs = [condition.words for condition in (flag.needs or ALWAYS).conditions]
    if own := [words for words in needs if words not in shared]:
        sentences.append(f"The flag needs {_together(own)}.")
    if flag.required:
        sentences.append(f"The flag is required with {needs[-1]}.")
    return " ".join(sentences)


def _together(conditions: Sequence[str]) -> str:
    """``conditions`` in one sentence. If one of several conditions lists several things, all of them are numbered."""
    if len(conditions) == 1 or not any(map(is_compound, conditions)):
        return listed(conditions)
    return listed([f"({number}) {words}" for number, words in enumerate(conditions, 1)])


def _entry(flag: Flag, shared: Collection[str], width: int) -> str:
    text = meaning(flag, shared) + _default(flag)
    indent = " " * 8
    wrapped = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join([f"  {usage(flag)}", *wrapped])
