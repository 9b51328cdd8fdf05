"""The checks before a start, on a real tokenizer, real files and real rewards."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import train
from slimelite.arguments import Args, ArgumentError, make_args
from slimelite.engines.checks import model_shapes
from slimelite.models.checkpoints import MARKER
from slimelite.models.files import load_config, weight_shapes
from slimelite.plan.devices import Machine
from slimelite.preflight import inspect, preflight
from slimelite.preflight.findings import Findings, format_report
from slimelite.tracking.metrics_file import MetricsFile
from tests.support import templates

CPU = Machine(gpus=0)
RUN = (
    "--input-key messages --label-key label --apply-chat-template --rm-type math --num-rollout 2 "
    "--rollout-batch-size 4 --n-samples-per-prompt 2 --rollout-max-response-len 16 --eval-interval 1"
)


@pytest.fixture
def run(model: Path, data: Path) -> str:
    """A command line for which everything is right."""
    return f"--hf-checkpoint {model} --prompt-data {data} --eval-prompt-data sums {data}@[:10] {RUN}"


def parse(words: str) -> Args:
    return make_args(words.split(), machine=CPU)


def problems(words: str) -> list[str]:
    return inspect(parse(words), CPU).problems


def test_a_good_run(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A warning is said at a start as well as in the dry run, with the seed that the weights are drawn from."""
    assert preflight(parse(run)) == 0
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("train.py: warning: --hf-checkpoint ")
    assert line.endswith("contains no weights: training starts from random weights (--seed 1234)")
    only = inspect(parse(f"{run} --debug-rollout-only --rollout-seed 7"), CPU)
    assert any("the engines sample from random weights (--rollout-seed 7)" in warning for warning in only.warnings)


def test_a_run_folder_is_for_one_run(run: str, tmp_path: Path) -> None:
    words = f"{run} --run-dir {tmp_path}"
    metrics = MetricsFile(tmp_path)
    metrics.write("start", {"rollout/step": 0})
    assert problems(words) == [], "that one failed before its first rollout"
    metrics.write("rollout", {"rollout/step": 0, "rollout/raw_reward": 0.5})
    metrics.close(False)
    (problem,) = problems(words)
    assert problem.startswith(
        f"--run-dir {tmp_path} contains another run: name a new folder, or remove this folder if the other run has"
    )
    # a script that resumes may be started again before its first checkpoint
    assert problems(f"{words} --load {tmp_path / 'checkpoints'}") == []
    assert problems(f"{words} --load {tmp_path / 'checkpoints'} --finetune") == [problem]


def test_a_new_run_that_saves_where_another_one_has_saved_is_warned(run: str, tmp_path: Path) -> None:
    words = f"{run} --save {tmp_path} --save-interval 1"
    assert not any("starts anew" in warning for warning in inspect(parse(words), CPU).warnings)
    (tmp_path / MARKER).write_text("399")
    (warning,) = (each for each in inspect(parse(words), CPU).warnings if "starts from the beginning" in each)
    assert warning.startswith(f"--save {tmp_path} has the checkpoint of rollout 399 of another run")
    assert warning.endswith(f"To continue the other run, add --load {tmp_path}. Otherwise name another folder")


def test_dry_run_report(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        f"{run} --dry-run --sequence-parallel --global-batch-size 3 --sglang-page-size 4 --wandb-key secret --use-wandb"
    )
    assert preflight(parse(words)) == 0
    text = capsys.readouterr().out
    assert "device" in text
    assert "(no GPU found)" in text
    assert "the last of 3 steps" in text
    assert "--sequence-parallel: this flag is for tensor parallelism" in text
    assert "--prompt-data: 100 prompts" in text
    assert "eval dataset sums: 10 prompts" in text
    assert "the right answer as the response to the first prompt gets 1.0 (label '0')" in text
    assert "secret" not in text
    assert text.endswith("ready to start\n")
    assert len(text.splitlines()) < 70


def test_a_curriculum_needs_levels(run: str) -> None:
    (problem,) = problems(f"{run} --curriculum-threshold 0.5 --launcher local")
    assert problem == (
        "--curriculum-threshold: the metadata of each row needs a number as level, but one row has None; rows of "
        "--environment 'reasoning-gym:gcd?levels=3', for example, have levels"
    )


def test_a_taken_port_of_prometheus_is_said_before_the_start(run: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (problem,) = problems(f"{run} --launcher local --use-prometheus --prometheus-port {port}")
    assert problem == f"--prometheus-port: 127.0.0.1:{port} is taken: name another port, or 0 for a free one"
    assert problems(f"{run} --launcher local --use-prometheus --prometheus-port 0") == []


@pytest.mark.parametrize(
    ("words", "package"),
    [
        ("", "ray"),
        ("--launcher local --use-wandb", "wandb"),
        ("--launcher local --rollout-backend sglang", "sglang"),
        ("--launcher local --use-tensorboard", "tensorboard"),
    ],
)
def test_packages_that_are_not_installed(run: str, monkeypatch: pytest.MonkeyPatch, words: str, package: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    (problem,) = problems(f"{run} {words}")
    assert problem.startswith(f"{package} is not installed: ")


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ("calculater", "did you mean calculator?"),
        ("reasoning-gym:gcd", "needs the package reasoning_gym, which is not installed; in slimelite's folder: pip"),
    ],
)
def test_an_environment_that_is_not_there_is_one_line_of_a_dry_run(
    run: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: str,
    says: str,
) -> None:
    gone, find = "reasoning_gym", importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == gone else find(name, *rest))
    with pytest.raises(SystemExit, match="2"):
        train.main(f"{run} --environment {environment} --dry-run".split())
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_flag_is_named_once_in_the_message_about_it(run: str) -> None:
    said = "--environment python:abc: give the time limit of a call in seconds after the colon, as in python:5"
    assert problems(f"{run} --environment python:abc") == [said]


def test_a_start_looks_at_the_first_rows_only(run: str) -> None:
    assert any("--prompt-data: 64 prompts" in fact for fact in inspect(parse(run), CPU).facts)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--label-key lable", "no column 'lable'"),
        ("--input-key prompt", "no column 'prompt'"),
        ("--prompt-data absent.parquet", "no such file: absent.parquet"),
        ("--eval-prompt-data gone gone.jsonl", "eval dataset gone: no such file: gone.jsonl"),
        ("--rm-type maths", "--rm-type maths: there is no such reward rule"),
        ("--rm-type dapo", "--reward-key"),
        ("--hf-checkpoint /no/such/model", "--hf-checkpoint /no/such/model: no such folder"),
        ("--tokenizer /no/such/folder", "--tokenizer: no tokenizer at '/no/such/folder', which must be a folder"),
        ("--num-layers 3 --add-qkv-bias", "--num-layers is 3 but the model's config.json has 2"),
        ("--custom-generate-function-path nowhere.py:f", "--custom-generate-function-path: no plugin file"),
        ("--dynamic-sampling-filter-path slimelite.rollout.filters.nothing", "--dynamic-sampling-filter-path: "),
        ("--rollout-sample-hook-path json.dumps --rollout-sample-hook-path nope.f", "--rollout-sample-hook-path: "),
        ("--load-debug-rollout-data r/{rollout_id}.parquet", "no saved rollout at r/0.parquet"),
        (
            "--load-debug-rollout-data r/{rollout}.parquet",
            "--load-debug-rollout-data r/{rollout}.parquet: only {rollout_id} can be",
        ),
        (
            "--save-hf out/{step}",
            "--save-hf out/{step}: only {rollout_id} can be filled in, here with 0 (KeyError: 'step')",
        ),
        ("--save-hf out/{", "--save-hf out/{: only {rollout_id} can be filled in"),
        (
            "--save-debug-rollout-data d/{rollout_id}{x}",
            "--save-debug-rollout-data d/{rollout_id}{x}: only {rollout_id} can be",
        ),
        ("--save-debug-rollout-data d/{rollout_id:03d}", "here with 'eval_0' (ValueError: Unknown format code 'd'"),
        (
            "--save-hf /proc/x/{rollout_id}",
            "--save-hf: /proc/x cannot be written to: No such file or directory (/proc)",
        ),
        ("--save-debug-rollout-data /proc/x/{rollout_id}", "--save-debug-rollout-data: /proc/x cannot be written to"),
        ("--save /proc/y/z --save-interval 1", "--save: /proc/y/z cannot be written to: No such file"),
        (f"--run-dir {__file__}", f"--run-dir: {__file__} cannot be written to: Not a directory"),
        ("--rollout-max-prompt-len 3", "no prompts left"),
        (
            "--rollout-stop-token-ids 511 512",
            "--rollout-stop-token-ids [512]: the model's vocabulary has the token ids 0 to 511",
        ),
        ("--rollout-stop-token-ids -7", "sums: stop_token_ids [-7]: the model's vocabulary has the token ids 0 to 511"),
        ("--tool-key functions --dry-run", "--prompt-data: no row has a column 'functions' (--tool-key)"),
        ("--metadata-key meta --dry-run", "eval dataset sums: no row has a column 'meta' (--metadata-key)"),
        ("--prompt-data owner/name", "pip install -e '.[hub]'"),
        ("--custom-generate-function-path slimelite.samples.sample.Sample", "is a class, not a function"),
        (f"--load-debug-rollout-data {__file__}", f"--load-debug-rollout-data: {__file__}: "),
        (f"--save-hf {__file__}", f"--save-hf: {__file__} is a file; name a folder"),
        ("--hf-checkpoint owner/name", "HF_HUB_OFFLINE is set, so the hub was not asked"),
    ],
)
def test_each_mistake_is_named(run: str, words: str, says: str) -> None:
    found = problems(f"{run} {words}")
    assert any(says in problem for problem in found), found
    assert all("\n" not in problem for problem in found)


def test_messages_without_the_chat_template_name_the_flag(run: str, tmp_path: Path) -> None:
    """The commonest mistake; code of one's own may want the messages themselves."""
    bare = run.replace("--apply-chat-template ", "")
    found = problems(bare)
    assert [problem.split(":")[0] for problem in found] == ["--prompt-data", "eval dataset sums"]
    assert all("column 'messages' contains messages: add --apply-chat-template" in problem for problem in found)
    plugin = tmp_path / "mine.py"
    plugin.write_text("async def generate(args, sample, params):\n    return sample\n")
    assert problems(f"{bare} --custom-generate-function-path {plugin}:generate") == []
    as_text = tmp_path / "text.jsonl"
    as_text.write_text(json.dumps({"messages": '[{"role": "user", "content": "1+1="}]', "label": "2"}))
    (problem,) = problems(f"{bare.replace('--eval-interval 1', '')} --prompt-data {as_text}")
    assert "row 0 (line 1): column 'messages': the messages are text; write them as a list" in problem


def test_how_a_family_is_trained_is_said_before_a_start(run: str, model: Path) -> None:
    run += " --dry-run"
    config = json.loads((model / "config.json").read_text())
    facts = inspect(parse(run), CPU).facts
    assert not any("one sequence" in fact for fact in facts)
    (model / "config.json").write_text(json.dumps({**config, "model_type": "openai-gpt"}))
    assert "--hf-checkpoint: openai-gpt is trained on one sequence per forward pass" in inspect(parse(run), CPU).facts
    (model / "config.json").write_text(json.dumps({**config, "model_type": "cpmant"}))
    (problem,) = problems(run)
    assert "cpmant cannot be trained: its tokens attend to later tokens" in problem


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads 3 is not a multiple of num_key_value_heads 2"),
        ({"head_dim": 7}, "head_dim 7: rotary positions need heads of an even width"),
        ({"hidden_size": 20}, "hidden_size 20 over 4 heads: rotary positions need heads of an even width"),
        ({"hidden_size": "16"}, "config.json: hidden_size '16': must be a whole number"),
        ({"max_position_embeddings": 256.5}, "config.json: max_position_embeddings 256.5: must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0: must be at least 1"),
        ({"vocab_size": "512"}, "Field 'vocab_size' expected int, got str"),
        ({"hidden_act": "nope"}, "(KeyError: 'nope'); compare it with the original"),
        ({"model_type": "nope"}, "model type `nope` but Transformers does not recognize"),
        ({"model_type": "t5"}, "cannot build a causal language model from its config.json (Unrecognized"),
        ({"model_type": "x", "auto_map": {"AutoConfig": "x.X", "AutoModelForCausalLM": "x.Y"}}, "needs Python files"),
        ({"layer_types": ["full_attention"]}, "must be equal to the number of `layer_types` (1)"),
        ({"model_type": "bert"}, "its tokens attend to later tokens"),
        ({"text_config": "x"}, "cannot build a causal language model"),
        ({"eos_token_id": 9999}, "or the tokenizer [9999]: the model's vocabulary has the token ids 0 to 511"),
    ],
)
def test_a_config_that_makes_no_model(run: str, model: Path, changes: dict[str, Any], says: str) -> None:
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    (problem,) = problems(f"{run} --dry-run")
    assert says in problem, problem
    assert problems(run) == [problem], "a start on Ray, too, says it before anything starts"
    assert len(problem) < 700


def test_a_config_does_not_choose_what_computes(run: str, model: Path) -> None:
    """A kernel that it names would be fetched from the hub and run."""
    config = model / "config.json"
    named = {"_attn_implementation": "someone/kernel", "_experts_implementation": "someone/kernel"}
    config.write_text(json.dumps({**json.loads(config.read_text()), **named}))
    assert problems(f"{run} --dry-run") == []
    assert model_shapes(str(model))["model.embed_tokens.weight"] == (512, 16)
    assert load_config(str(model))._attn_implementation is None


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", "{", "config.json: is damaged or cut short: not JSON (Expecting property"),
        ("config.json", "[" * 100_000, "config.json: is damaged or cut short: not JSON (maximum recursion"),
        ("config.json", "[]", "config.json: is damaged: it does not contain a JSON object"),
        ("generation_config.json", "{", "generation_config.json: is damaged or cut short"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id 'x' is not a token id"),
        ("tokenizer.json", "[]", "--hf-checkpoint: no tokenizer at "),
        ("tokenizer.json", None, "has no vocabulary: its tokenizer.json is missing"),
        ("chat_template.jinja", "{{ 1 / 0 }}", "row 0 (line 1): column 'messages': the chat template refuses these"),
        ("chat_template.jinja", "{{ 'x' * 10 ** 14 }}", "--hf-checkpoint: the chat template takes more than 512 MB"),
        ("chat_template.jinja", "{% for i in range(10 ** 7) %}{% endfor %}", "(Range too big"),
    ],
)
def test_a_broken_file_of_the_model_is_named(run: str, model: Path, file: str, content: str | None, says: str) -> None:
    if content is None:
        settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": "x"}
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
        (model / file).unlink()
    else:
        (model / file).write_text(content)
    found = problems(run)
    assert any(says in problem for problem in found), found


@contextmanager
def not_root() -> Iterator[None]:
    """Root may read everything."""
    was = os.geteuid()
    os.seteuid(65534 if was == 0 else was)
    try:
        yield
    finally:
        os.seteuid(was)


def test_weights_that_may_not_be_read_are_not_said_to_be_missing() -> None:
    with tempfile.TemporaryDirectory() as folder:  # in a folder that everybody may enter
        weights = Path(folder, "model.safetensors")
        save_file({"lm_head.weight": np.zeros((2, 2), np.float32)}, weights)
        Path(folder).chmod(0o755)
        weights.chmod(0)
        with not_root(), pytest.raises(PermissionError, match=f"Permission denied: '{weights}'"):
            weight_shapes(Path(folder))


def test_what_may_not_be_read_is_a_line_that_names_it(run: str, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    words = f"{run} --run-dir {closed / 'run'}"
    args = parse(words)
    assert inspect(args, CPU).problems == []
    closed.chmod(0)
    with not_root():
        assert any(f"{closed}/run/metrics.jsonl" in problem for problem in inspect(args, CPU).problems)
        # a long path is cut
        with pytest.raises(ArgumentError, match=r"--run-dir /.*closed.* cannot be used: Permission denied"):
            parse(words)
    closed.chmod(0o700)


def test_a_model_is_not_saved_over_the_one_that_it_starts_from(run: str, model: Path) -> None:
    (problem,) = problems(f"{run} --save-hf {model}/")
    assert (
        problem == f"--save-hf: {model} is the folder of --hf-checkpoint, and would be overwritten; name another folder"
    )


def test_a_reference_of_fewer_tokens(run: str, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "small")
    config = tmp_path / "small" / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 512', '"vocab_size": 200'))
    (problem,) = problems(f"{run} --use-kl-loss --kl-loss-coef 0.1 --ref-load {tmp_path / 'small'}")
    assert "small: the vocabulary has 200 tokens, but the tokenizer has 258: use a reference model" in problem


def test_conversations_are_checked_and_some_are_made(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    words = f"--hf-checkpoint {model} --prompt-data {path} --loss-type sft_loss --num-rollout 1 --rollout-batch-size 2"
    asked, reply = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
    template = model / "tokenizer_config.json"
    template.write_text(template.read_text().replace("{{ m.content }}", "{{ m.content + '' }}"))
    for row, says in (
        ({"input": [asked, reply]}, None),
        ({"input": "1+1="}, "SFT reads whole conversations, but the prompt is text"),
        ({"input": "1+1=", "answer": "2"}, "; if 'input' is the prompt and 'answer' the reply, convert the file"),
        ({"input": [asked]}, "2 of the first 2 conversations have no token of an assistant to train on; --input-key"),
        ({"input": [asked, {**reply, "content": 2}]}, "conversation 0 ('1+1='): the chat template refuses"),
        ({"input": [asked, reply], "tools": [1]}, "row 0 (line 1): column 'tools': tool 0 must be an object"),
    ):
        path.write_text(f"{json.dumps(row)}\n" * 2)
        found = problems(words)
        assert len(found) == (says is not None), found
        assert says is None or says in found[0]
    path.write_text(f"{json.dumps({'input': [asked, reply]})}\n{json.dumps({'input': [asked]})}\n")
    assert any("1 of the first 2 conversations" in warning for warning in inspect(parse(words), CPU).warnings)
    path.write_text(f"{json.dumps({'prompt': '1+1=', 'completion': '2'})}\n" * 2)
    findings = inspect(parse(words), CPU)
    (shown,) = [fact for fact in findings.facts if "the first conversation as the model sees it: '<|im_start|>" in fact]
    assert "1+1=<|im_end|>" in shown
    assert "3 of these tokens are trained on; the first 2 conversations have " in shown
    assert not any("does not know" in line for line in findings.warnings)
    settings = json.loads(template.read_text())
    template.write_text(json.dumps(settings | {"unk_token": "1"}))
    (warning,) = [line for line in inspect(parse(words), CPU).warnings if "does not know" in line]
    assert re.search(r"\d+% of the tokens of the first 2 conversations are 1: the tokenizer", warning)
    template.write_text(json.dumps(settings | {"unk_token": settings["eos_token"]}))  # GPT-2 has one token for both
    assert not any("does not know" in line for line in inspect(parse(words), CPU).warnings)
    template.write_text(json.dumps(settings))
    called = {**reply, "tool_calls": [{"name": "add", "arguments": "{}"}]}
    path.write_text("".join(json.dumps({"input": [asked, answer]}) + "\n" for answer in (reply, called)))
    warnings = inspect(parse(words), CPU).warnings
    assert any(
        "leaves tool_calls out of 1 of the first 2 rows: the model cannot learn tool_calls" in line for line in warnings
    )


def test_sft_with_an_evaluation_names_what_applies_the_template_to_it(model: Path, tmp_path: Path) -> None:
    train, held, config = (tmp_path / name for name in ("train.jsonl", "held.jsonl", "eval.yaml"))
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    train.write_text(json.dumps({"messages": turns}))
    words = (
        f"--hf-checkpoint {model} --prompt-data {train} --loss-type sft_loss --num-rollout 1 --rollout-batch-size 2 "
        "--eval-interval 1 --rm-type f1 --eval-label-key label --eval-max-response-len 8"
    )
    remedy = "set apply_chat_template: true in the file of --eval-config (docs/user_guide.md#sft)"
    held.write_text(json.dumps({"messages": turns[:1], "label": "2"}))
    (problem,) = problems(f"{words} --eval-prompt-data held {held}")
    assert problem.startswith(f"eval dataset held: the prompt contains messages: {remedy} to turn them into text")
    assert problem.endswith("or name a column of text with --eval-input-key")
    config.write_text(f"datasets: [{{name: held, path: {held}, apply_chat_template: true}}]")
    findings = inspect(parse(f"{words} --eval-config {config}"), CPU)
    assert findings.problems == []
    assert not any("apply" in line for line in findings.warnings)
    held.write_text(json.dumps({"prompt": "1+1=", "label": "2"}))
    findings = inspect(parse(f"{words} --eval-prompt-data held {held}"), CPU)
    assert findings.problems == []
    assert any(f"chat template is not used: {remedy} if this is a chat" in line for line in findings.warnings)


@pytest.mark.parametrize(("part", "rows"), [("", 200), ("@[:100]", 100)])
def test_the_line_that_converts_a_file_reads_all_its_rows(
    part: str, rows: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only those that a start looks at."""
    monkeypatch.chdir(tmp_path)
    Path("big.csv").write_text("question,answer\n" + "1+1=,2\n" * 200)
    words = f"--hf-checkpoint {model} --loss-type sft_loss --num-rollout 1 --rollout-batch-size 2 --prompt-data"
    (problem,) = problems(f"{words} big.csv{part}")
    assert "--prompt-data: big.csv has no column 'input'" in problem
    exec(shlex.split(problem.partition(" (see docs/data_formats.md): ")[2])[2])
    assert Path("big.converted.jsonl").read_text().count("\n") == rows
    findings = inspect(parse(f"{words} big.converted.jsonl"), CPU)
    assert findings.problems == []
    named = "big.converted.jsonl: read as prompt and completion: prompt/completion"
    assert findings.notes == [f"--prompt-data: {named}"]
    assert not any("read as" in line for line in findings.warnings)


def test_prompts_that_are_answered_already(run: str, tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    path.write_text(json.dumps({"messages": turns, "label": "2"}))
    warnings = inspect(parse(f"{run} --prompt-data {path}"), CPU).warnings
    assert any(
        "--prompt-data: column 'messages' contains conversations that end with an answer" in line for line in warnings
    )
    assert not any("eval dataset sums: column" in line for line in warnings)


def test_a_label_that_no_rule_reads_is_one_message(run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "1+1="}], "label": true}\n')
    (problem,) = problems(f"{run.replace('math', 'gsm8k')} --prompt-data {path}")
    assert "gsm8k needs a number as label" in problem
    assert caplog.text == "", "no traceback beside it"


def test_pairs_are_checked_and_one_is_made(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    asked = '{"messages": [{"role": "user", "content": "1+1="}], "chosen": "2", '
    path.write_text(f'{asked}"rejected": "eleven"}}\n' * 3)
    words = (
        f"--hf-checkpoint {model} --prompt-data {path} --input-key messages --loss-type dpo_loss --num-rollout 1 "
        "--rollout-batch-size 2"
    )
    findings = inspect(parse(words), CPU)
    assert findings.problems == []
    assert "--prompt-data: 3 pairs" in findings.facts
    (shown,) = [fact for fact in findings.facts if "the first pair" in fact]
    assert "chosen '2<|im_end|>\\n' (3 tokens), rejected 'eleven<|im_end|>\\n' (8 tokens)" in shown
    (problem,) = problems(f"{words} --chosen-key best")
    assert "column 'best'" in problem
    path.write_text(f'{asked}"rejected": "2"}}\n')
    (problem,) = problems(words)
    assert "pairs.jsonl: 1 of 1 rows is malformed: row 0 (line 1): column 'rejected': the reply equals" in problem
    path.write_text('{"messages": "1+1=", "chosen": [{"role": "assistant", "content": "2"}], "rejected": "3"}')
    settings = model / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("{% for", "{{ raise_exception('no pairs') }}{% for"))
    (problem,) = problems(words)
    assert "no pairs" in problem


def test_the_check_of_folders_leaves_nothing_behind(run: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    words = f"--run-dir {tmp_path}/a --save {tmp_path}/b/c --save-interval 1 --save-hf {tmp_path}/d/{{rollout_id:03d}}"
    assert problems(f"{run} {words} --save-debug-rollout-data {tmp_path}/e/{{rollout_id}}.parquet") == []
    assert sorted(tmp_path.rglob("*")) == before


def test_all_mistakes_are_named_together(run: str) -> None:
    found = problems(f"{run} --label-key lable --num-layers 3 --add-qkv-bias --custom-rm-path nowhere.py:f")
    assert len(found) == 4  # plugin, layers, and the label column of both datasets


def test_without_a_model_the_data_are_checked_too(run: str, data: Path) -> None:
    found = problems(f"{run} --hf-checkpoint /no --prompt-data {data} gone.jsonl --rm-type maths")
    assert [problem.split(";")[0] for problem in found] == [
        "--hf-checkpoint /no: no such folder",
        "--rm-type maths: there is no such reward rule",
        "--prompt-data: no such file: gone.jsonl (--prompt-data, --eval-prompt-data)",
    ]
    (_, label, again) = problems(f"{run} --hf-checkpoint /no --label-key lable")
    assert "--prompt-data: " in label
    assert "eval dataset sums: " in again
    assert "no column 'lable'" in label
    (_, reward, _) = problems(f"{run} --hf-checkpoint /no --rm-type dapo")
    assert "--reward-key" in reward


def test_rows_that_are_left_out_are_counted(run: str, tmp_path: Path) -> None:
    data = tmp_path / "some.jsonl"
    good = '{"messages": [{"role": "user", "content": "1+1="}], "label": "2"}'
    data.write_text(f'{good}\n{{"messages"\n{{"messages": 3, "label": "1"}}\n[]\n')
    words = f"{run} --dry-run --prompt-data {data}"
    findings = inspect(parse(f"{words} --skip-bad-rows"), CPU)
    assert findings.problems == []
    warning = findings.warnings[-1]
    assert warning.startswith(
        f"--prompt-data: {data}: 3 of 4 rows are malformed and left out: row 1 (line 2): not JSON"
    )
    (problem,) = problems(words)
    assert "3 of 4 rows are malformed: " in problem
    assert all(row in problem for row in ("row 1 (line 2): ", "row 2 (line 3): ", "row 3 (line 4): "))


def test_a_dry_run_for_an_unknown_gpu_ends_in_a_message(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        train.main(f"{run} --dry-run --plan-gpu h10:8 --lr fast".split())
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.count("--plan-gpu h10:8: this GPU is not in the planner's list; did you mean h100:8?") == 1
    assert "--lr takes a number" in err


def test_dry_run_names_misread_flags_and_missing_files_together(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        train.main(f"{run} --dry-run --lr fast --prompt-data absent.jsonl".split())
    lines = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2
    assert "--lr takes a number" in lines[0]
    assert "no such file: absent.jsonl" in lines[1]


@pytest.mark.parametrize("words", ["--dry-run", "--dry-run --hf-checkpoint /no", "--dry-run --lr"])
def test_dry_run_of_next_to_nothing_ends_in_messages(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main(words.split())
    assert all(line.startswith("train.py: --") for line in capsys.readouterr().err.splitlines())


def test_a_reward_that_raises(run: str, tmp_path: Path) -> None:
    plugin = tmp_path / "my_reward.py"
    plugin.write_text("async def reward(args, sample):\n    raise RuntimeError('boom at ' + sample.label)\n")
    (problem,) = {p.split(": ", 1)[1] for p in problems(f"{run} --custom-rm-path {plugin}:reward")}
    assert "boom at 0" in problem


def test_a_plugin_that_cannot_be_imported(run: str, tmp_path: Path) -> None:
    plugin = tmp_path / "broken.py"
    plugin.write_text("1 / 0\n")
    found = problems(f"{run} --custom-rm-path {plugin}:reward")
    assert any("ZeroDivisionError" in problem for problem in found)


def test_labels_that_the_rule_cannot_read(run: str, tmp_path: Path) -> None:
    data = tmp_path / "wrong.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "2 + 2 ="}], "label": "2 + 2 = 4 #### 4"}\n')
    (problem,) = problems(f"{run} --prompt-data {data}")
    assert "gsm8k" in problem


def test_lengths_beyond_the_context(run: str) -> None:
    findings = inspect(parse(f"{run} --rollout-max-response-len 1000"), CPU)
    assert any("exceed the model's context of 256" in warning for warning in findings.warnings)
    findings = inspect(parse(f"{run} --use-dynamic-batch-size --max-tokens-per-gpu 32"), CPU)
    assert any("more than --max-tokens-per-gpu 32" in warning for warning in findings.warnings)


def test_a_cache_smaller_than_prompt_and_response(run: str) -> None:
    """The engine would cut every response short."""
    facts = inspect(parse(run), CPU).facts
    longest = int(next(fact for fact in facts if fact.startswith("--prompt-data: 64")).split()[-2])
    assert problems(f"{run} --kv-cache-tokens {longest + 16}") == []
    cut, full = problems(f"{run} --kv-cache-tokens {longest + 15}")[0], problems(f"{run} --kv-cache-tokens 1")[0]
    assert cut == (
        f"--kv-cache-tokens {longest + 15} would cut responses short: a prompt of {longest} tokens (--prompt-data); "
        f"with a response of 16, there are {longest + 16}; raise --kv-cache-tokens, or lower "
        "--rollout-max-response-len"
    )
    assert full == (
        f"--prompt-data: a prompt of {longest} tokens, which leaves no room for a response in --kv-cache-tokens of 1; "
        "shorten the prompts, or raise the limit"
    )


def test_an_episode_that_begins_with_more_than_the_context(run: str, tmp_path: Path) -> None:
    """It would end before the first reply, in every rollout."""
    file = tmp_path / "own.py"
    file.write_text(
        "from slimelite.environments.protocol import Start, Step\n"
        "class Long:\n"
        "    def reset(self, row):\n"
        "        return Start([{'role': 'user', 'content': 'word ' * 60}])\n"
        "    def step(self, reply):\n"
        "        return Step(reward=1.0, done=True)\n"
    )
    own = f"{run.replace('--rm-type math', '')} --environment {file}:Long"
    for words, limit in (("", "the model's context of 256"), ("--rollout-max-context-len 32", "-len of 32")):
        found = problems(f"{own} {words}")
        assert re.match(r"--prompt-data: an episode begins with 3\d\d tokens, which leaves no room for a re", found[0])
        assert found[0].endswith(f"{limit}; shorten the prompts, or raise the limit")


def test_a_tokenizer_too_large_for_the_model(run: str, model: Path) -> None:
    config = model / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 512', '"vocab_size": 200'))
    assert any("but the model's vocabulary has 200" in problem for problem in problems(run))


def test_what_a_critic_starts_from_is_there(run: str, model: Path, tmp_path: Path) -> None:
    ppo = f"{run} --advantage-estimator ppo"
    assert problems(f"{ppo} --critic-load {model}") == []
    assert any(
        p.startswith("--critic-load /nowhere: no such folder") for p in problems(f"{ppo} --critic-load /nowhere")
    )
    assert any(p.startswith(f"--critic-load {tmp_path}: ") for p in problems(f"{ppo} --critic-load {tmp_path}"))
    (tmp_path / "trainer.json").write_text("{}")  # a saved critic
    assert problems(f"{ppo} --critic-load {tmp_path}") == []


def test_too_few_gpus_warn_in_a_dry_run_and_stop_a_start(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    two = Machine(gpus=2)
    words = f"{run} --actor-num-gpus-per-node 4 --rollout-num-gpus 4"
    dry = inspect(make_args([*words.split(), "--dry-run"], machine=two), two)
    assert dry.problems == []
    assert any("8 GPUs are needed" in warning for warning in dry.warnings)
    start = inspect(make_args(words.split(), machine=two), two)
    assert any("8 GPUs are needed" in problem and "has 2" in problem for problem in start.problems)
    shared = inspect(make_args([*words.split(), "--colocate"], machine=two), two)
    assert any("4 GPUs are needed" in problem for problem in shared.problems)
    theirs = inspect(make_args([*run.split(), "--rollout-external-engine-addrs", "there:1"], machine=two), two)
    assert any("2 cuda device(s) for 2 training rank(s) and 1 engine(s)" in fact for fact in theirs.facts)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")  # the GPUs may be on other nodes
    assert inspect(make_args(words.split(), machine=two), two).problems == []


def test_report_of_problems(run: str) -> None:
    args = parse(f"{run} --dry-run --rm-type maths")
    text = format_report(args, inspect(args, CPU), [])
    assert "problems\n  --rm-type maths: there is no such reward rule" in text
    assert text.endswith("1 problem(s) found")


def test_flags_without_effect_are_shown_reason_by_reason(run: str) -> None:
    words = f"{run} --tis-clip 3 --mis-level sequence --tis-clip-low 1"
    shown = format_report(make_args(words.split(), machine=CPU), Findings(), [])
    assert "no effect here\n  --tis-clip, --tis-clip-low: needs --correction tis, icepop or custom" in shown
    assert "\n  --mis-level: needs --correction mis\n" in shown


def test_train_py_dry_run(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train.main([*run.split(), "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("ready to start\n")
    assert not (tmp_path / "runs").exists()
    with pytest.raises(SystemExit, match="2"):
        train.main([*run.split(), "--esp-clip", "1"])
    assert capsys.readouterr().err == "train.py: --esp-clip is not a known flag; did you mean --eps-clip?\n"


def test_what_sglangs_kernels_need_of_the_machine(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Machine(gpus=1, sglang=True)
    args = make_args([*run.split(), "--colocate", "--dry-run", "--rollout-backend", "sglang"], machine=node)

    def warnings() -> list[str]:
        return [w for w in inspect(args, node).warnings if "nvcc" in w or "glibc" in w]

    monkeypatch.setattr(os, "confstr", lambda _name: "glibc 2.31")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    old, compiler = warnings()
    assert "glibc 2.34 or newer, and this machine has glibc 2.31" in old
    assert "RTX 4090" in compiler
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setattr(os, "confstr", lambda _name: "glibc 2.36")
    assert warnings() == []


def test_servers_that_release_memory_do_not_get_the_allocators_variables(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Machine(gpus=2, sglang=True)

    def warnings(words: str) -> list[str]:
        args = make_args([*run.split(), "--dry-run", *words.split()], machine=node)
        return [warning for warning in inspect(args, node).warnings if "ALLOC" in warning]

    assert warnings("--colocate") == []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    (warning,) = warnings("--colocate")
    assert warning.startswith(
        "PYTORCH_CUDA_ALLOC_CONF in the environment is passed to trainers, but not to sglang servers"
    )
    assert warnings("--actor-num-gpus-per-node 1 --rollout-num-gpus 1") == []
    assert warnings("--colocate --rollout-backend embedded") == []


def test_an_environment_begins_one_episode(run: str, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from slimelite.environments.protocol import Start\n"
        "class Own:\n"
        "    def reset(self, row):\n"
        "        return Start([*row.prompt, {'role': 'user', 'content': row.label}])\n"
        "    def step(self, reply):\n"
        "        return None\n"
        "class Broken:\n"
        "    def reset(self, row):\n"
        "        return row.metadata['there is none']\n"
        "    step = reset\n"
        "class Bare:\n"
        "    pass\n"
    )
    run = run.replace("--rm-type math", "")
    good = inspect(parse(f"{run} --environment {file}:Own"), CPU)
    assert good.problems == []
    for name in ("--prompt-data", "eval dataset sums"):
        (fact,) = [fact for fact in good.facts if fact.startswith(f"{name}: an episode begins with ")]
        assert fact.endswith(" tokens, no tools")
    for found in problems(f"{run} --environment {file}:Broken"):
        assert re.search(r"does not start: KeyError: 'there is none' \(.*own.py, line 9, in reset\)", found)
    assert "no 'Brok'; did you mean Broken?" in problems(f"{run} --environment {file}:Brok")[0]
    said = "Bare has no method reset and no method step; an environment needs reset and step (docs/agents.md)"
    assert said in problems(f"{run} --environment {file}:Bare")[0]
    (tmp_path / "odd.py").write_text("class E:\n    def reset(self row):\n")
    (odd,) = problems(f"{run} --environment {tmp_path}/odd.py:E")
    assert re.match(r"--environment .*odd.py:E: cannot load '.*odd.py:E': SyntaxError: .* \(odd.py, line 2\)", odd)
    # the quickstart's template has no place for tools
    (no_tools,) = problems(f"{run} --environment calculator")
    assert no_tools.startswith("--environment calculator: the chat template shows the model no tools")


def test_an_environment_with_tools_needs_a_template_whose_calls_are_read(run: str, model: Path, tmp_path: Path) -> None:
    """It would train on episodes without a call: the message shows one, and what can be done."""
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    words = f"{run} --environment calculator".replace(str(model), str(copy), 1)

    def found(template: str, more: str = "") -> list[str]:
        (copy / "chat_template.jinja").write_text(template)
        return [problem for problem in problems(words + more) if problem.startswith("--environment calculator")]

    shown = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}"
    calls = "{% for c in m.tool_calls or () %}@{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    (unknown,) = found(f"{shown}{calls}{{% endfor %}}")
    assert "the format of the model's tool calls is unknown: the chat template writes a call of f as '@f{" in unknown
    assert "Set --tool-call-parser to one of gemma4, harmony, " in unknown
    (wrong,) = found(f"{shown}{calls}{{% endfor %}}{{# <tool_call> #}}")
    assert "cannot be read: the chat template writes a call of f as '@f{" in wrong
    assert "The format hermes finds 0 calls in it. Set --tool" in wrong
    (silent,) = found(f"{shown}{{% endfor %}}")
    assert "shows tools, but no calls of the model" in silent
    (refused,) = found(
        f"{shown}{{% if m.tool_calls %}}{{{{ raise_exception('no calls') }}}}{{% endif %}}{{% endfor %}}"
    )
    assert "a message with a tool call fails: the chat template refuses these messages (no calls)" in refused
    assert found(f"{shown}{{% endfor %}}", " --tool-call-parser hermes") == []
    for name in ("gptoss", "gemma4", "lfm2"):
        assert found(templates.source(name)) == []


def test_tools_that_the_template_does_not_show_are_said(run: str, tmp_path: Path) -> None:
    file, tool = tmp_path / "tools.jsonl", {"type": "function", "function": {"name": "look", "parameters": {}}}
    row = {"messages": [{"role": "user", "content": "1+1="}], "label": "2"}

    def found(*tools: object) -> Findings:
        file.write_text(json.dumps(row) + "\n" + json.dumps({**row, "tools": tools}) + "\n")
        return inspect(parse(f"{run} --prompt-data {file}"), CPU)

    (warning,) = [warning for warning in found(tool).warnings if "have tools" in warning]
    assert warning.startswith("--prompt-data: 1 of the first 2 rows have tools, and the chat template does not show th")
    assert found({"type": "web_search"}).problems == []
    for nameless in ({"type": "function", "function": {"description": "x"}}, {"name": 3}, {"function": "look"}):
        (problem,) = found(tool, nameless).problems
        assert "column 'tools': tool 1 has no name: " in problem


def test_a_reward_key_without_entries_is_said(run: str) -> None:
    warnings = inspect(parse(f"{run} --reward-key score"), CPU).warnings
    (said,) = [warning for warning in warnings if "--reward-key" in warning]
    assert said.startswith("--reward-key score: the reward of the first row of --prompt-data is 1.0, a number")
    parts = inspect(parse(f"{run} --rm-type dapo --reward-key score"), CPU).warnings
    assert not [warning for warning in parts if "--reward-key" in warning]


def test_the_key_of_an_environment_is_in_no_message(run: str) -> None:
    found = problems(f"{run} --environment http://:hidden-key@127.0.0.1:9")
    assert any("http://***@127.0.0.1:9" in problem for problem in found)
    assert "hidden-key" not in "".join(found)
