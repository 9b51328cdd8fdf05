from __future__ import annotations

from pathlib import Path

import pytest
from fake_run import make_args
from huggingface_hub import constants

from slimelite.tracking.card import base_of, fetch_card, model_card
from tests.support.fake_hub import fake_hub


def test_the_licence_of_a_base_on_the_hub_is_in_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    card = b"---\nlicense: other\nlicense_name: llama3.2\nlicense_link: LICENSE.txt\ntags: [x]\n---\n# Base\n"
    with fake_hub() as hub, hub.talking(monkeypatch):
        hub.repos["them/base"] = {"main": {"README.md": card}}
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        fetch_card("them/base")
        assert base_of("them/base") == {"base_model": "them/base"}, "nothing is asked offline"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        fetch_card("them/base")
        fetch_card("them/none")  # a card that is not there ends no run
    licence = {"license": "other", "license_name": "llama3.2", "license_link": "LICENSE.txt"}
    assert base_of("them/base") == {"base_model": "them/base", **licence}
    shown = model_card(make_args(tmp_path, hf_checkpoint="them/base"), 4)
    assert "base_model: them/base\nlicense: other\nlicense_name: llama3.2\n" in shown
    assert "| licence of the base | llama3.2 |" in shown


@pytest.mark.parametrize("text", ["", "# no front matter", "---\n{: [\n---\n", "---\n- a list\n---\n"])
def test_a_card_that_is_none_says_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert base_of(str(tmp_path)) == {}
    assert base_of(None) == {}


@pytest.mark.parametrize("value", ["[{}]", "{{<<: [{}]}}", "{{[{}]: x}}"])
def test_aliases_in_the_card_of_a_stranger_are_not_written_out(value: str, tmp_path: Path) -> None:
    """Twelve levels of ten aliases are 10^12 values."""
    levels = "".join(f"l{n}: &l{n} {value.format(', '.join([f'*l{n - 1}'] * 10))}\n" for n in range(1, 13))
    bomb = f"---\nl0: &l0 {{name: x}}\n{levels}license: *l12\nlicense_link: null\n*l12 : x\n"
    bomb += f"license_name: {'long ' * 100}\n---\n"
    (tmp_path / "README.md").write_text(bomb)
    assert base_of(str(tmp_path)) == {"license_name": ("long " * 100)[:200]}


def test_lists_in_the_card_of_a_base_are_read(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    text = "---\nlicense:\n- apache-2.0\n- mit\n- null\n- {a: b}\nbase_model: [them/a, them/b]\nlicense_link: []\n---\n"
    (base / "README.md").write_text(text)
    assert base_of(str(base)) == {"base_model": ["them/a", "them/b"], "license": ["apache-2.0", "mit"]}
    shown = model_card(make_args(tmp_path, hf_checkpoint=str(base)), 4)
    assert "base_model:\n- them/a\n- them/b\nlicense:\n- apache-2.0\n- mit\n" in shown
    assert "| licence of the base | apache-2.0, mit |" in shown
    (base / "README.md").write_text("---\nlicense: [apache-2.0]\n---\n")
    assert "| licence of the base | apache-2.0 |" in model_card(make_args(tmp_path, hf_checkpoint=str(base)), 4)
    (base / "README.md").write_text(f"---\nlicense: [{', '.join(['mit'] * 1000)}]\n---\n")
    assert base_of(str(base)) == {"license": ["mit"] * 20}


def test_scores_are_those_before_training_and_of_this_model(tmp_path: Path) -> None:
    records = [
        {"kind": "eval", "eval/step": step, "eval/sums": score, "eval/sums-stderr": 0.01}
        for step, score in ((-1, 0.25), (1, 0.5), (3, 0.75))
    ]
    args = make_args(tmp_path / "mine", push_to_hub="me/sums")
    card = model_card(args, 1, records)
    assert "| sums | 0.250 ±0.010 | 0.500 ±0.010 |\n" in card
    assert 'name = "me/sums"' in card
    assert "# sums\n" in card
    assert "This model was not evaluated." in model_card(args, 2, records)


def test_a_reward_model_is_scored_with_in_its_card(tmp_path: Path) -> None:
    card = model_card(make_args(tmp_path, loss_type="reward_model_loss"), 0)
    assert "AutoModelForSequenceClassification.from_pretrained(name)" in card
    assert "generate" not in card
    assert "pipeline_tag" not in card
