"""The arithmetic task, and a model that SFT has started on it: made once, by the commands that a user would run."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

import train  # noqa: E402
from slimelite.preflight import problems_of  # noqa: E402
from slimelite.stages import run_stages  # noqa: E402

Rows = list[dict[str, Any]]
# a run of four short rollouts, in seconds, with a critic, a filter and surplus groups, in the folder of `small`
SMALL_FLAGS = shlex.split("""
    --launcher local --device cpu --deterministic-mode --hf-checkpoint model --prompt-data data/train.jsonl
    --input-key prompt --label-key label --custom-rm-path reward.py:digits --rollout-shuffle
    --eval-prompt-data heldout data/heldout.jsonl --eval-interval 2 --n-samples-per-eval-prompt 1
    --rollout-batch-size 3 --n-samples-per-prompt 4 --over-sampling-batch-size 5 --rollout-max-response-len 8
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    --num-steps-per-rollout 2 --use-dynamic-batch-size --max-tokens-per-gpu 128 --async-rollout
    --advantage-estimator ppo --kl-coef 0.05 --ref-update-interval 3 --critic-lr 5e-3
    --lr 3e-3 --lr-decay-style cosine --num-rollout 4
""")
# a reward that a random model earns now and then: the share of digits in the response
DIGITS = """
async def digits(args, sample, **kwargs):
    return sum(symbol.isdigit() for symbol in sample.response) / max(1, len(sample.response))
"""


def metrics(run_dir: Path, name: str) -> list[float]:
    """Every value of a metric, in order."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def run_process(
    *command: str, env: dict[str, str] | None = None, cwd: Path = ROOT, timeout: float = 1200
) -> subprocess.CompletedProcess[str]:
    """A command as a user types it, from the repository's root or from ``cwd``; what outlasts it is ended with it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    process = subprocess.Popen(
        command, cwd=cwd, env={**clean, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # scripts stop the Ray head that they started
        out, err = process.communicate(timeout=1200)
        pytest.fail(f"{command[:3]} took longer than {timeout} s:\n{out[-2000:]}\n{err[-2000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


TrainPy = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def train_py(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> TrainPy:
    """``train_py(*words)``: the program train.py with a command line in this process, which has its imports."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        status = run_stages(train.main, problems_of)
        return subprocess.CompletedProcess(words, status, *capfd.readouterr())

    return run


Shared = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """``shared(name, make)``: a folder that ``make`` fills once for all processes in which pytest runs the tests."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def folder(name: str, make: Callable[[Path], None]) -> Path:
        made = root / f"{name}.made"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                make(root / name)
                made.touch()
        return root / name

    return folder


@pytest.fixture(scope="session")
def task(shared: Shared) -> Path:
    """The quickstart's data folder, smaller."""
    return shared("task", make_task)


def make_task(out: Path) -> None:
    script = str(ROOT / "scripts" / "prepare_data.py")
    done = run_process(
        sys.executable,
        script,
        "quickstart",
        "--out",
        str(out),
        "--held-out",
        "64",
        "--sft-rows",
        "12800",
        "--worked-share",
        "0.4",
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def sft(task: Path, shared: Shared) -> Path:
    """The run folder of 200 optimizer steps of SFT; the model is in ``model``."""
    return shared("sft", partial(make_sft, task))


def make_sft(task: Path, run: Path) -> None:
    status = train.main(
        [
            *("--launcher", "local", "--hf-checkpoint", str(task / "model")),
            *("--prompt-data", str(task / "sft.parquet"), "--input-key", "messages"),
            *("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--debug-train-only"),
            *("--loss-type", "sft_loss", "--calculate-per-token-loss", "--disable-compute-advantages-and-returns"),
            *("--num-epoch", "1", "--rollout-batch-size", "640", "--global-batch-size", "64"),
            *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096"),
            *("--optimizer", "muon", "--muon-lr", "0.02", "--lr", "5e-3"),
            *("--save-hf", str(run / "model"), "--run-dir", str(run)),
        ]
    )
    assert status == 0


@pytest.fixture(scope="session")
def grpo_args(task: Path, sft: Path) -> list[str]:
    """GRPO on the task from the SFT model; tests add what they are about."""
    return [
        *("--hf-checkpoint", str(sft / "model"), "--prompt-data", str(task / "train.parquet")),
        *("--input-key", "messages", "--label-key", "label", "--apply-chat-template", "--rollout-shuffle"),
        *("--rm-type", "gsm8k", "--rollout-batch-size", "8", "--n-samples-per-prompt", "4"),
        *("--rollout-max-response-len", "32", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "512"),
        *("--lr", "1e-3", "--colocate"),
    ]


@pytest.fixture
def local_run(grpo_args: list[str], tmp_path: Path) -> Callable[..., Path]:
    """``local_run(name, *flags)``: a run in this process that must succeed; returns its folder."""

    def run(name: str, *flags: str) -> Path:
        folder = tmp_path / name
        assert train.main([*grpo_args, "--launcher", "local", "--run-dir", str(folder), *flags]) == 0
        return folder

    return run


@pytest.fixture
def small(shared: Shared, tmp_path: Path) -> Path:
    """A folder with what ``SMALL_FLAGS`` name: a model of one layer with random weights, sums, a reward."""
    shutil.copytree(shared("small", make_small), tmp_path, dirs_exist_ok=True)
    return tmp_path


def make_small(folder: Path) -> None:
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    symbols = ["<pad>", "<end>", "<unk>", *"0123456789+-=?#abcdef"]
    tokenizer = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(symbols[:3])
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special).save_pretrained(
        folder / "model"
    )
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True, "initializer_range": 0.2}
    tokens = {"vocab_size": 24, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **sizes, **heads, **tokens))
    model.save_pretrained(folder / "model")
    (folder / "data").mkdir()
    for name, numbers in (("train", range(10, 30)), ("heldout", range(30, 33))):
        rows = [{"prompt": f"{n}+{n % 7}=?", "label": str(n + n % 7)} for n in numbers]
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(DIGITS)
