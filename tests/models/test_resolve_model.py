"""`resolve_model`: what the commands that take MODEL|RUN|CHECKPOINT find."""

from __future__ import annotations

import json
import os
from pathlib import Path

import huggingface_hub
import pytest

from slimelite.apps.runnable import Source, resolve_model, resolve_models
from slimelite.data.tokenizer import load_tokenizer
from slimelite.models.checkpoints import CHECKSUMS, MARKER, ROLLOUT_SEED, ROLLOUT_STATE, STATE_FILE
from tests.support.fake_hub import fake_hub


def write(file: Path, age: int = 0, **content: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
    os.utime(file, (1_000_000 - age, 1_000_000 - age))
    return file.parent


def test_a_model_and_a_hub_id_are_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(tmp_path / "config.json", model_type="qwen2")
    assert resolve_model(str(model)) == Source(str(model))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"no/model: no such folder, and it is not in the cache .*HF_HUB_OFFLINE is"):
        resolve_model("no/model")
    downloaded = tmp_path / "models--no--model"
    write(downloaded / "snapshots" / "abc" / "config.json", model_type="qwen2")
    (downloaded / "refs").mkdir()
    (downloaded / "refs" / "main").write_text("abc")
    assert resolve_model("no/model") == Source("no/model")


def test_what_the_hub_says_of_a_model_that_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub() as hub, hub.talking(monkeypatch):
        for load in (resolve_model, load_tokenizer):
            with pytest.raises(ValueError, match=r"no/model.*the Hugging Face hub did not give it: no/model is not a"):
                load("no/model")
            with monkeypatch.context() as offline:
                offline.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
                with pytest.raises(ValueError, match=r"no/model.*HF_HUB_OFFLINE is set, so the hub was not asked"):
                    load("no/model")


def test_a_repository_without_a_model_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with fake_hub() as hub, hub.talking(monkeypatch):
        hub.repos["no/config"] = {"main": {"model.gguf": b""}}
        with pytest.raises(ValueError, match="no/config: the repository on the Hugging Face hub does not contain"):
            resolve_model("no/config")


def test_a_run_means_the_newest_model_that_it_wrote(tmp_path: Path) -> None:
    run = write(tmp_path / "run" / "config.json", hf_checkpoint="base", save_hf=f"{tmp_path}/hf/{{rollout_id:03d}}/m")
    with pytest.raises(ValueError, match="contains no model yet"):
        resolve_model(str(run))
    newest = write(tmp_path / "hf" / "009" / "m" / "config.json", model_type="qwen2")
    write(tmp_path / "hf" / "010" / "m" / "config.json", 60, model_type="qwen2")
    (tmp_path / "hf" / "011" / "m").mkdir(parents=True)  # being written
    assert resolve_model(str(run)) == Source(str(newest))
    one = write(tmp_path / "one" / "config.json", hf_checkpoint="base", save_hf=str(newest))
    assert resolve_model(str(one)) == Source(str(newest))


def saved(folder: Path, step: int, *, whole: bool = True, **state: object) -> Path:
    """The folder of ``--save`` after rollout ``step``."""
    place = folder / f"iter_{step:07d}"
    place.mkdir(parents=True)
    (folder / MARKER).write_text(str(step))
    for name in (ROLLOUT_STATE, STATE_FILE) if whole else ():
        (place / name).write_text(json.dumps({"rollout_id": step, ROLLOUT_SEED: 42, **state}))
    (place / CHECKSUMS).write_text(json.dumps({"files": {}}))
    return folder


def test_an_adapter_and_a_checkpoint_have_a_base(tmp_path: Path) -> None:
    """The one that is given, or that of the run, else the one that they name."""
    adapter = write(tmp_path / "hf" / "adapter_config.json", base_model_name_or_path="some/base")
    assert resolve_model(str(adapter)) == Source(str(adapter), "some/base")
    assert resolve_model(str(adapter), "my/base") == Source(str(adapter), "my/base")
    run = write(tmp_path / "run" / "config.json", hf_checkpoint="its/base", save_hf=str(adapter), save=None)
    assert resolve_model(str(run)) == Source(str(adapter), "its/base")
    folder = saved(tmp_path / "saved", 3, base="some/base")
    place = folder.absolute() / "iter_0000003"
    assert resolve_model(str(folder)) == resolve_model(str(place)) == Source(str(place), "some/base")
    assert resolve_model(str(place), "my/base") == Source(str(place), "my/base")
    run = write(tmp_path / "other" / "config.json", hf_checkpoint="its/base", save_hf=None, save=str(folder))
    assert resolve_model(str(run)) == Source(str(place), "its/base")


def test_what_is_no_model_is_said_with_the_remedy(tmp_path: Path) -> None:
    run = write(tmp_path / "run" / "config.json", hf_checkpoint="base", save_hf=None)
    with pytest.raises(ValueError, match="it had no --save-hf and no checkpoint; it started from base"):
        resolve_model(str(run))
    adapter = write(tmp_path / "adapter" / "adapter_config.json", r=8)
    with pytest.raises(ValueError, match="does not name its base model: name the model with --base"):
        resolve_model(str(adapter))
    with pytest.raises(ValueError, match=r"iter_0000003/rollout_state\.json is missing: is it a Megatron checkpoint"):
        resolve_model(str(saved(tmp_path / "saved", 3, whole=False)))
    with pytest.raises(ValueError, match="does not name its base model: name the model with --base"):
        resolve_model(str(saved(tmp_path / "whole", 3)))
    moved = str(tmp_path / "moved" / "base")
    for folder in (
        saved(tmp_path / "s", 3, base=moved),
        write(tmp_path / "a" / "adapter_config.json", base_model_name_or_path=moved),
    ):
        with pytest.raises(ValueError, match="moved/base, which does not exist: name the base with --base"):
            resolve_model(str(folder))
        assert [resolve_model(str(folder), base).base for base in ("my/base", "gpt2")] == ["my/base", "gpt2"]
    whole = str(write(tmp_path / "whole model" / "config.json", model_type="qwen2"))
    with pytest.raises(ValueError, match="--base my/base is for adapters and checkpoints, but"):
        resolve_models([whole], "my/base")
    assert [source.base for source in resolve_models([whole, str(folder)], "my/base")] == [None, "my/base"]
    with pytest.raises(ValueError, match="no such folder"):
        resolve_model(str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="is missing"):
        resolve_model(str(write(tmp_path / "empty" / "other.json")))


def test_of_a_damaged_checkpoint_the_message_says_what_these_commands_can_do(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", 3, base="some/base")
    saved(folder, 4, base="some/base")
    newest = folder / "iter_0000004"
    (newest / STATE_FILE).write_text("{")
    for path, remedy in ((folder, f"name {folder}/iter_0000003 in place"), (newest, "name the folder of another")):
        with pytest.raises(ValueError, match=remedy) as caught:
            resolve_model(str(path))
        assert "trainer.json: is damaged" in str(caught.value)
        assert "--" not in str(caught.value)
