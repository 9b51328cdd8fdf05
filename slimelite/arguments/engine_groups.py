"""``--sglang-config``: engines of different sizes and settings, in groups, from a YAML file of slime's format ::

sglang:
  - name: actor
    server_groups:
      - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2, overrides: {mem_fraction_static: 0.6}}
      - {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 1}
      - {worker_type: placeholder, num_gpus: 2}      # GPUs that stay free
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slimelite.arguments.cluster import EnginePlace
from slimelite.arguments.refused import SGLANG_SET_HERE
from slimelite.arguments.sources import load_yaml
from slimelite.arguments.vocabulary import Vocabulary

if TYPE_CHECKING:
    from slimelite.arguments.derive import Draft

OPTION = "--sglang-config"
MODEL_KEYS = {"name", "model_path", "num_gpus_per_engine", "server_groups", "engine_groups", "update_weights"}
GROUP_KEYS = {"worker_type", "num_gpus", "num_gpus_per_engine", "overrides"}


def derive_engine_groups(draft: Draft) -> None:
    """One place for each engine of the file; what the file asks for and is not here becomes a problem."""
    args = draft.args
    if args.sglang_config is None or args.rollout_backend != "sglang":
        return
    content = load_yaml(args.sglang_config, OPTION, draft.settings)
    if content is None:
        return
    try:
        places = tuple(_places(draft, content))
    except ValueError as error:
        draft.complain(OPTION, f"{args.sglang_config}: {error}")
        return
    draft.set("engine_places", places, f"{OPTION} {args.sglang_config}")
    draft.set("num_engines", 0 if args.debug_train_only else len(places), OPTION)


def _places(draft: Draft, content: Any) -> Iterator[EnginePlace]:
    args = draft.args
    models = content.get("sglang") if isinstance(content, dict) else None
    if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
        raise ValueError("needs sglang: a list of models, each with its server_groups")
    for model in models:
        _check_keys(f"model {model.get('name')!r}", model, MODEL_KEYS)
    ours = [model for model in models if _is_policy(model, args.hf_checkpoint)]
    if frozen := [str(model.get("name")) for model in models if model not in ours]:
        raise ValueError(
            f"model {', '.join(map(repr, frozen))} is frozen, and only engines of the policy run here: start a server "
            "for it yourself, which a reward (--rm-url) or a generate function asks"
        )
    if len(ours) > 1:
        raise ValueError(f"{len(ours)} models are the policy; put their server_groups under one")
    width = ours[0].get("num_gpus_per_engine") or args.rollout_num_gpus_per_engine
    groups = ours[0].get("server_groups") or ours[0].get("engine_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ValueError(f"model {ours[0].get('name')!r} needs server_groups: a list")
    first = 0
    for number, group in enumerate(groups):
        yield from _engines_of(group, f"server group {number}", first, width)
        first += group["num_gpus"]
    if first != args.rollout_num_gpus:
        raise ValueError(f"its groups have {first} GPUs, and --rollout-num-gpus is {args.rollout_num_gpus}")


def _engines_of(group: dict[str, Any], where: str, first: int, width: int) -> Iterator[EnginePlace]:
    _check_keys(where, group, GROUP_KEYS)
    kind, gpus = group.get("worker_type", "regular"), group.get("num_gpus")
    if not isinstance(gpus, int) or gpus < 1:
        raise ValueError(f"{where}: num_gpus is {gpus!r}; it is a number of GPUs, at least 1")
    if kind == "placeholder":
        return
    if kind != "regular":
        raise ValueError(f"{where}: worker_type {kind} is not supported: every engine takes prompts and decodes them")
    width = group.get("num_gpus_per_engine") or width
    if gpus % width:
        raise ValueError(f"{where}: {gpus} GPUs do not divide into engines of {width}")
    overrides = {str(name).replace("-", "_"): value for name, value in (group.get("overrides") or {}).items()}
    known = {option.field for option in Vocabulary(object).sglang.values()}
    for name in overrides:
        if name in SGLANG_SET_HERE or name not in known:
            raise ValueError(f"{where}: override {name}: {SGLANG_SET_HERE.get(name, 'SGLang has no such option')}")
    for engine in range(gpus // width):
        yield EnginePlace(first + engine * width, width, overrides)


def _is_policy(model: dict[str, Any], checkpoint: str | None) -> bool:
    default = model.get("model_path") in (None, checkpoint)
    given = model.get("update_weights")
    return default if given is None else bool(given)


def _check_keys(where: str, entry: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"{where}: unknown keys {', '.join(unknown)}; it takes {', '.join(sorted(known))}")
