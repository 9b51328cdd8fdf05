"""The model card (README.md) of a saved model: base, licence, method, data, flags, scores, versions, and how to use
it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import yaml

import slimelite
from slimelite.arguments import Args, LoraArgs
from slimelite.arguments.sources import YAML_BYTES
from slimelite.base.files import write_text
from slimelite.models.checkpoints import HUB_ID, read_json
from slimelite.tracking.console import PLURALS, method, plugins, unit_of
from slimelite.tracking.metrics_file import Record, eval_metrics, read_metrics, series
from slimelite.tracking.run_folder import SOURCES, entry

CARD = "README.md"
# keys that are copied from a base model's card to the cards of models that are trained from it
LICENCE = ("license", "license_name", "license_link")
# most characters of a text from a base model's card, and most texts of a list
LONGEST, MOST = 200, 20
# flags for folders and addresses of the run's machine
PLACES = ("save", "save_hf", "load", "push_to_hub", "wandb_dir", "tensorboard_dir", "update_weight_disk_dir")
FOLDER = "THIS FOLDER"
HEADS = {"transformers": "AutoModelForCausalLM", "peft": "AutoPeftModelForCausalLM"}


def writes_adapter(args: LoraArgs) -> bool:
    """Whether ``--save-hf`` writes an adapter instead of a model."""
    return args.lora_rank > 0 and not args.lora_merge


def write_card(folder: Path, args: Args, rollout_id: int, records: Sequence[Record] = ()) -> None:
    """Write the card of the model in ``folder``, which was trained up to ``rollout_id``. ``records``: the run's
    metrics."""
    write_text(folder / CARD, model_card(args, rollout_id, records, chats=_chats(folder)))


def add_scores(folder: Path, args: Args, rollout_id: int) -> None:
    """Write the card again with the model's evaluation, which took place after the model was saved.

    If ``folder`` is not visible on this machine, its card stays unchanged.
    """
    if (folder / CARD).is_file():
        write_card(folder, args, rollout_id, read_metrics(args.run_dir))


def model_card(args: Args, rollout_id: int, records: Sequence[Record] = (), *, chats: bool = True) -> str:
    """The text of a model's card. ``chats``: whether the model has a chat template."""
    base, library = base_of(args.hf_checkpoint), "peft" if writes_adapter(args) else "transformers"
    head = {"library_name": library, "pipeline_tag": None if args.loss.scores else "text-generation", **base}
    made_of = args.hf_checkpoint or f"a new model of {args.num_layers} layers with random weights"
    turns = PLURALS[unit_of(args.job)]
    licence = base.get("license_name", base.get("license", "not named in its card")) if base else ""
    facts = {
        "base": made_of,
        "licence of the base": licence if isinstance(licence, str) else ", ".join(licence),
        "method": method(args),
        "custom code": ", ".join(plugins(args)),
        "data": ", ".join(args.prompt_data),
        "trained": f"{rollout_id + 1} of {args.num_rollout} {turns} (the last has number {rollout_id}, the first 0)",
        "versions": f"slimelite {slimelite.__version__}, "
        + ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers")),
    }
    flags = [entry(name, value) for name, value in args.user_values.items() if name not in (*SOURCES, *PLACES)]
    parts = [
        f"---\n{yaml.safe_dump({k: v for k, v in head.items() if v}, sort_keys=False)}---",
        f"# {Path(args.push_to_hub or args.run_dir or 'A model').name}",
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in facts.items() if value)]),
        "## Scores",
        scores(records, rollout_id),
        "## Use",
        f"```python\n{usage(args, chats=chats)}\n```",
        "## Flags",
        "\n".join(["```yaml", *flags, "```"]),
    ]
    return "\n\n".join(parts) + "\n"


def scores(records: Sequence[Record], rollout_id: int) -> str:
    """A table of the evaluations before training and after ``rollout_id``, with standard errors."""
    rows = []
    for name in eval_metrics(records):
        values = dict(zip(*series(records, name), strict=True))
        errors = dict(zip(*series(records, f"{name}-stderr"), strict=True))
        if rollout_id in values:
            cells = [_score(values.get(at), errors.get(at)) for at in (-1, rollout_id)]
            rows.append(f"| {name.removeprefix('eval/')} | {' | '.join(cells)} |")
    if not rows:
        return "This model was not evaluated."
    return "\n".join(["| | before training | this model |", "|---|---:|---:|", *rows, "", "±: standard error."])


def usage(args: Args, *, chats: bool) -> str:
    """Python code that loads the model and generates an answer."""
    library = "peft" if writes_adapter(args) else "transformers"
    kind = "AutoModelForSequenceClassification" if args.loss.scores else HEADS[library]
    name = f'name = "{args.push_to_hub or FOLDER}"'
    if library == "peft" and args.hf_checkpoint and Path(args.hf_checkpoint).is_dir():
        # elsewhere the folder that the adapter's config names may not exist
        lines = [
            "from peft import PeftModel",
            f"from transformers import {HEADS['transformers']}, AutoTokenizer",
            "",
            f'base = "{Path(args.hf_checkpoint).resolve()}"  # the base model: this folder, or a copy',
            name,
            f"model = PeftModel.from_pretrained({HEADS['transformers']}.from_pretrained(base), name)",
        ]
    else:
        tokenizer = "AutoTokenizer" if library == "peft" else f"{kind}, AutoTokenizer"
        lines = [f"from peft import {kind}"] if library == "peft" else []
        lines += [f"from transformers import {tokenizer}", "", name, f"model = {kind}.from_pretrained(name)"]
    lines += ["tokenizer = AutoTokenizer.from_pretrained(name)"]
    if args.loss.scores:
        messages = '[{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]'
        rendered = f"tokenizer.apply_chat_template({messages}, tokenize=False)" if chats else '"What is 2 + 2? 4"'
        # a template adds the special tokens itself, and training does not add a second BOS
        options = ("add_special_tokens=False, " if chats else "") + 'return_tensors="pt"'
        lines += [f"text = {rendered}", f"print(model(**tokenizer(text, {options})).logits[0])"]
        return "\n".join(lines)
    if chats:
        options = 'add_generation_prompt=True, return_tensors="pt", return_dict=True'
        lines += ['messages = [{"role": "user", "content": "What is 2 + 2?"}]']
        lines += [f"inputs = tokenizer.apply_chat_template(messages, {options})"]
    else:
        lines += ['inputs = tokenizer("Two and two are", return_tensors="pt")']
    lines += [
        "output = model.generate(**inputs, max_new_tokens=64)",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]
    return "\n".join(lines)


def base_of(model: str | None) -> dict[str, str | list[str]]:
    """The card's entries about the model that training began from. ``base_model`` is the name of a hub model: the model
    itself, or the base model that the card in a local folder names. The model's licence is included if it is known.
    """
    if model is None:
        return {}
    there = _front_matter(model)
    named: dict[str, str | list[str]] = (
        {"base_model": model} if HUB_ID.fullmatch(model) and not Path(model).exists() else {}
    )
    if not named and (above := there.get("base_model")):
        named = {"base_model": above}
    return named | {key: there[key] for key in LICENCE if there.get(key)}


def fetch_card(model: str) -> None:
    """Download the card of a hub id, so that the licence is known when a model is saved. If the hub does not answer,
    do nothing."""
    if Path(model).exists() or not HUB_ID.fullmatch(model):
        return
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE or try_to_load_from_cache(model, CARD) is not None:
        return
    with suppress(Exception):  # the card is optional, so its absence must not end a run
        hf_hub_download(model, CARD)


def _front_matter(model: str) -> dict[str, str | list[str]]:
    """The texts and the lists of texts in the YAML header of a card. A text is cut to `LONGEST` characters, and a list
    to `MOST` texts. The result is {} if the card has no header.

    The card may be a stranger's. So only the nodes of the header are read: a value with aliases may be huge.
    """
    path: object = Path(model) / CARD
    if not Path(model).exists() and HUB_ID.fullmatch(model):
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(model, CARD)
    if not isinstance(path, str | Path) or not Path(path).is_file():
        return {}
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        opening, _, rest = file.read(YAML_BYTES).partition("---\n")
    with suppress(yaml.YAMLError, RecursionError):
        header = yaml.compose(rest.partition("\n---")[0], yaml.SafeLoader) if not opening.strip() else None
        entries = header.value if isinstance(header, yaml.MappingNode) else []
        return {_text(key): _texts(value) for key, value in entries}
    return {}


def _texts(node: yaml.Node) -> str | list[str]:
    """The text or the list of texts in a node of YAML."""
    if isinstance(node, yaml.SequenceNode):
        return [text for item in node.value[:MOST] if (text := _text(item))]
    return _text(node)


def _text(node: yaml.Node) -> str:
    """The text in a node of YAML; empty for null, lists and mappings."""
    is_text = isinstance(node, yaml.ScalarNode) and node.tag != "tag:yaml.org,2002:null"
    return str(node.value)[:LONGEST] if is_text else ""


def _chats(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    named = config.is_file() and "chat_template" in read_json(config)
    return named or any(folder.glob("chat_template*"))


def _score(value: float | None, error: float | None) -> str:
    return "" if value is None else f"{value:.3f}" + ("" if error is None else f" ±{error:.3f}")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
