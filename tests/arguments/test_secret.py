"""Secrets on the command line are shown, saved and logged nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from slimelite.arguments import Args, ArgumentError, make_args, parse_args
from slimelite.arguments.secret import HIDDEN, is_masked, masked, masked_words, public_part
from slimelite.plan.devices import Machine
from slimelite.preflight import preflight
from slimelite.tracking.run_folder import RunFolder

COMPLETE = (
    "--hf-checkpoint owner/model --prompt-data p.jsonl --num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 2 "
    "--rollout-max-response-len 16"
)
VARIABLES = {"HF_TOKEN": "hf_123", "NCCL_DEBUG": "INFO", "https_proxy": "http://me:pw456@proxy:3128", "RETRIES": 3}


def parse(words: list[str]) -> Args:
    return make_args([*COMPLETE.split(), *words], machine=Machine(gpus=0))


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *((name, True) for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID")),
        *((name, True) for name in ("api_key", "OPENAI_KEY", "PG_PASSWORD_2", "db_password", "ssl_keyfile_password")),
        *((name, True) for name in ("PGPASSWORD", "MYSQL_PWD", "MYSECRETKEY", "SLACK_WEBHOOK_URL", "DATABASE_DSN")),
        *((name, False) for name in ("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "speculative_token_map", "MONKEY")),
        *((name, False) for name in ("input_key", "eval_label_key", "NCCL_DEBUG", "PATH", "KEYBOARD")),
    ],
)
def test_the_name_of_a_variable_tells(name: str, secret: bool) -> None:
    assert masked("train_env_vars", {name: "x"}) == {name: HIDDEN if secret else "x"}


def test_what_is_shown_keeps_the_rest() -> None:
    shown = masked("train_env_vars", VARIABLES)
    assert shown == {**VARIABLES, "HF_TOKEN": HIDDEN, "https_proxy": f"http://{HIDDEN}@proxy:3128"}
    assert is_masked(shown)
    assert not is_masked(VARIABLES)
    public, private = public_part(VARIABLES)
    assert public == {"NCCL_DEBUG": "INFO", "RETRIES": "3"}
    assert private == {"HF_TOKEN": "hf_123", "https_proxy": "http://me:pw456@proxy:3128"}
    assert masked("rm_url", ["https://a:b@host/x@y"]) == [f"https://{HIDDEN}@host/x@y"]


def test_a_saved_configuration_does_not_give_the_mask_for_the_secret(tmp_path: Path) -> None:
    RunFolder(tmp_path).save_config(parse(["--train-env-vars", json.dumps(VARIABLES)]))
    for name in ("config.yaml", "config.json"):
        text = (tmp_path / name).read_text()
        assert ("hf_123" in text, "pw456" in text, "INFO" in text) == (False, False, True), name
    saved = str(tmp_path / "config.yaml")
    with pytest.raises(ArgumentError, match=r"--train-env-vars has \*\*\* in place of a secret"):
        make_args(["--config", saved], machine=Machine(gpus=0))
    assert make_args(["--config", saved, "--train-env-vars", '{"A": "b"}'], machine=Machine(gpus=0)).train_env_vars == {
        "A": "b"
    }
    values = yaml.safe_load((tmp_path / "config.yaml").read_text())
    del values["train_env_vars"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert make_args(["--config", saved], machine=Machine(gpus=0)).train_env_vars == {}


def test_the_dry_run_and_errors_show_none(capsys: pytest.CaptureFixture[str]) -> None:
    secrets = [
        "--train-env-vars",
        json.dumps(VARIABLES),
        "--wandb-key",
        "k789",
        "--use-wandb",
        "--sglang-api-key",
        "s012",
    ]
    preflight(parse([*secrets, "--dry-run"]))
    said = capsys.readouterr().out
    assert "HF_TOKEN" in said
    for wrong in (
        ["--train-env-vars", '{"HF_TOKEN": "hf_123"'],
        ["--train-env-vars", '"hf_123"'],
        ["--wandb-key", "k789", "s012"],
    ):
        with pytest.raises(SystemExit):
            parse_args(wrong)
    with pytest.raises(SystemExit):
        parse_args(["--train-env-vars", ""])  # a variable that is not set
    said += capsys.readouterr().err
    assert said.count("--train-env-vars takes") == 3
    for secret in ("hf_123", "pw456", "k789", "s012"):
        assert secret not in said


def test_a_command_line_is_shown_without_them() -> None:
    argv = [
        "--train-env-vars",
        '{"A": "x"}',
        "--lr",
        "1",
        "--wandb-key=x",
        "--sglang-api-key",
        "x",
        "--rm-url",
        "http://x:x@h",
    ]
    shown = masked_words(argv)
    assert shown == [
        *("--train-env-vars", HIDDEN, "--lr", "1", f"--wandb-key={HIDDEN}"),
        *("--sglang-api-key", HIDDEN, "--rm-url", f"http://{HIDDEN}@h"),
    ]
