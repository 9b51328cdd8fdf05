"""User functions by path: ``pkg.module.fn``, ``path/to/file.py:fn``, or slime's name for one of our functions.

A slime plugin has imports such as ``from slime.utils.types import Sample``. If slime is not installed, loading a plugin
adds an import finder at the end of ``sys.meta_path``. The finder provides only the modules of ``MODULES``, under the
names ``slime`` and ``miles``. The object behind a name is imported when the name is first used.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import zlib
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from slimelite.base.guard import PACKAGE, ending, guarded, import_failure, kept_alive, nearest

F = "slimelite.slime.functions"
AGENTS = "slimelite.slime.agents"
ROLLOUT = "slimelite.rollout"
REWARDS = "slimelite.rewards"


def _same(module: str, *names: str) -> dict[str, str]:
    """Entries for ``names`` that are the same in our module."""
    return {name: f"{module}.{name}" for name in names}


# module of slime -> name in the module -> our object
MODULES: dict[str, dict[str, str]] = {
    "slime.utils.types": _same("slimelite.samples.sample", "Sample"),
    "slime.utils.http_utils": _same(F, "post", "get"),
    "slime.utils.misc": _same("slimelite.slime.plugins", "load_function") | _same(AGENTS, "SingletonMeta"),
    "slime.utils.async_utils": _same("asyncio", "run"),
    "slime.utils.processing_utils": _same(F, "load_tokenizer"),
    "slime.utils.data": _same(F, "Dataset", "read_file"),
    "slime.utils.eval_config": {"EvalDatasetConfig": "slimelite.arguments.EvalDataset"},
    "slime.utils.mask_utils": _same(F, "MultiTurnLossMaskGenerator", "get_response_lengths"),
    "slime.observability.trace_utils": _same(F, "trace_span", "trace_function", "build_sglang_meta_trace_attrs"),
    "slime.backends.megatron_utils.cp_utils": dict.fromkeys(
        ["all_gather_with_cp", "slice_log_prob_with_cp"], f"{F}.whole_response"
    ),
    "slime.rollout.base_types": {
        **_same(f"{ROLLOUT}.context", "RolloutFnTrainOutput", "RolloutFnEvalOutput"),
        **_same(F, "call_rollout_fn"),
    },
    "slime.rollout.sglang_rollout": {
        **_same(f"{ROLLOUT}.generate", "generate_rollout"),
        **_same(F, "generate", "generate_and_rm", "generate_and_rm_group", "GenerateState", "get_model_url"),
    },
    # the asynchronous rollout of slime is the same function here, because --async-rollout generates ahead
    "slime.rollout.fully_async_rollout": {"generate_rollout_fully_async": f"{ROLLOUT}.generate.generate_rollout"},
    "slime.rollout.sft_rollout": {"generate_rollout": f"{ROLLOUT}.generate.offline_rollout"},
    "slime.rollout.sample_hooks": _same(F, "apply_rollout_sample_hooks"),
    "slime.rollout.on_policy_distillation": _same(F, "reward_func", "post_process_rewards"),
    "slime.rollout.data_source": dict.fromkeys(
        ["RolloutDataSource", "RolloutDataSourceWithBuffer"], "slimelite.data.prompts.DataSource"
    ),
    "slime.rollout.rm_hub": _same(F, "async_rm", "batched_async_rm", "grade_answer_verl"),
    "slime.rollout.rm_hub.math_utils": {
        **_same(F, "grade_answer_verl"),
        **_same(f"{REWARDS}.math", "extract_boxed_answer", "last_boxed_only_string", "remove_boxed"),
        "extract_answer": f"{REWARDS}.math.extract_boxed_answer",
        "_strip_string": f"{REWARDS}.math.strip_string",
    },
    "slime.rollout.rm_hub.math_dapo_utils": {
        **_same(F, "is_correct_minerva", "is_correct_strict_box"),
        **_same(f"{REWARDS}.math", "compute_score", "normalize_final_answer", "last_boxed_only_string", "remove_boxed"),
    },
    "slime.rollout.rm_hub.deepscaler": {"get_deepscaler_rule_based_reward": f"{F}.deepscaler_reward"},
    "slime.rollout.rm_hub.gpqa": _same(F, "compute_gpqa_reward"),
    "slime.rollout.rm_hub.f1": _same(f"{REWARDS}.text", "f1_score", "normalize_answer"),
    "slime.rollout.filter_hub.base_types": _same(f"{ROLLOUT}.filters", "DynamicFilterOutput"),
    "slime.rollout.filter_hub.dynamic_sampling_filters": _same(
        f"{ROLLOUT}.filters", "check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback"
    ),
    "slime.agent.adapters": dict.fromkeys(["OpenAIAdapter", "AnthropicAdapter", "BaseAdapter"], f"{AGENTS}.Adapter"),
    "slime.agent.adapters.openai": {"OpenAIAdapter": f"{AGENTS}.Adapter"},
    "slime.agent.adapters.anthropic": {"AnthropicAdapter": f"{AGENTS}.Adapter"},
    "slime.agent.parsing": _same(AGENTS, "parse_model_output", "ParsedModelOutput"),
    "slime.agent.aiohttp_threaded": _same(AGENTS, "run_app_in_thread", "FilteredAccessLogger"),
}
# full name in slime or in miles -> our object
SLIME_NAMES = {
    f"{root}{module.removeprefix('slime')}.{name}": ours
    for root in ("slime", "miles")
    for module, names in MODULES.items()
    for name, ours in names.items()
}


def resolve(name: str) -> Callable[..., Any]:
    """Our object behind one of ``SLIME_NAMES``."""
    module, _, attribute = SLIME_NAMES[name].rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def install_finder() -> None:
    """From now on, ``import slime…`` and ``import miles…`` find ``SLIME_NAMES``, unless these packages are
    installed."""
    served = {f.root for f in sys.meta_path if isinstance(f, SlimeFinder)}
    for root in {"slime", "miles"} - served:
        spec = importlib.util.find_spec(root)
        if spec is None or spec.origin is None:  # a folder of that name without code is not slime
            sys.meta_path.append(SlimeFinder(root))


class SlimeFinder(MetaPathFinder, Loader):
    """Finds and creates the modules of ``SLIME_NAMES``. ``root``: the top package, slime or miles."""

    def __init__(self, root: str) -> None:
        self.root = root

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        """The spec of a package if ``fullname`` is a known name or the prefix of a known name.

        Raises:
            ModuleNotFoundError: ``fullname`` is another module of ``root``. The message lists the known modules.
        """
        if fullname != self.root and not fullname.startswith(self.root + "."):
            return None
        if not any(name.startswith(fullname + ".") for name in SLIME_NAMES):
            modules = ", ".join(sorted(self.root + module.removeprefix("slime") for module in MODULES))
            raise ModuleNotFoundError(
                f"slimelite does not provide {fullname}; it provides these modules of {self.root}: {modules}",
                name=fullname,
            )
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Look up attributes only when they are read, so that an import of the module imports nothing else."""
        prefix = module.__name__ + "."

        def lookup(attribute: str) -> Any:
            if prefix + attribute in SLIME_NAMES:
                return resolve(prefix + attribute)
            if attribute.startswith("__") or any(n.startswith(f"{prefix}{attribute}.") for n in SLIME_NAMES):
                raise AttributeError(attribute)
            known = sorted(n.removeprefix(prefix) for n in SLIME_NAMES if n.startswith(prefix))
            raise ImportError(f"slimelite does not provide {prefix}{attribute}; it provides {', '.join(known)}")

        module.__dict__["__getattr__"] = lookup


# files that `run_file` has run in this process; its child processes run them too
files_run: list[str] = []


def load_function(path: str, flag: str | None = None) -> Callable[..., Any]:
    """The function (or class) at ``path``.

    ``sys.exit`` and ``os._exit`` in the function become a `PluginError`. Without this conversion, the run would end as
    if it had succeeded. ``flag``: the option that named the function. With ``flag``, every error becomes a
    `PluginError`. Without ``flag``, errors are raised unchanged, so that the caller can count them or retry.

    Known ``slime.…`` names refer to our own functions, also in the imports of a plugin (see `MODULES`). A file is
    loaded only once, even if several flags name it. The file's folder is appended to ``sys.path``, so that the file can
    import other files of the folder.

    Raises:
        ValueError: there is no such file, module or function (the message has the nearest name), or its import fails.
    """
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    if not module_name or not name:
        raise ValueError(f"{path!r} is not a plugin path: write package.module.function or path/to/file.py:function")
    if name == "py" and Path(path).is_file():
        raise ValueError(f"{path!r} names a file, but not a function or class in the file: write {path}:name")
    if path in SLIME_NAMES:
        return resolve(path)
    install_finder()
    try:
        with kept_alive():
            module = _load_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
        function = getattr(module, name, None)
    except ImportError as error:
        raise ValueError(f"cannot load {path!r}: {error}{_nearest_module(module_name, error)}") from error
    except SystemExit as error:
        raise ValueError(f"cannot load {path!r}: it calls {ending(error)} while it is imported") from error
    if function is None:
        raise ValueError(f"{module_name} has no {name!r}{nearest(name, vars(module))}")
    if not callable(function):
        raise ValueError(f"{path!r} is a {type(function).__name__}, not a function")
    is_ours = str(getattr(function, "__module__", "")).partition(".")[0] == PACKAGE.name
    return function if is_ours or isinstance(function, type) else guarded(function, path, flag)


def run_file(path: str, option: str) -> None:
    """Run the user's file at ``path``. ``option`` is the flag that names the file. A process runs a file only once.

    Raises:
        ValueError: the file is missing or fails. The message is one line of text and names the line of the error.
    """
    install_finder()
    try:
        with kept_alive():
            _load_file(path)
    except (Exception, SystemExit) as error:
        raise ValueError(import_failure(option, path, error)) from error
    if (file := str(Path(path).resolve())) not in files_run:
        files_run.append(file)


def _load_file(path: str) -> ModuleType:
    file = Path(path).resolve()
    if not file.is_file():
        neighbours = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise ValueError(f"no plugin file {file}{nearest(file.name, neighbours)}")
    name = f"{file.stem}_{zlib.crc32(str(file).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, as in Python's import: dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _nearest_module(name: str, error: ImportError) -> str:
    missing = error.name or ""
    if not isinstance(error, ModuleNotFoundError) or not name.startswith(missing):
        return ""  # the plugin exists, but one of its imports is missing
    parent, _, leaf = missing.rpartition(".")
    if not parent:  # an installed package with a similar name is rarely meant
        return "; write path/to/file.py:function, or add the folder of the module to PYTHONPATH"
    paths = getattr(sys.modules.get(parent), "__path__", None)
    return nearest(leaf, [m.name for m in pkgutil.iter_modules(paths)], f"{parent}.") if paths is not None else ""
