"""Multiple-choice tasks: likelihoods are those of a plain forward pass, and the likeliest choice is the response."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from slimelite.arguments import EvalDataset
from slimelite.arguments.evaluation import load_task
from slimelite.data.tokenizer import load_tokenizer
from slimelite.rollout.manager import RolloutManager
from tests.data.tokenizers import begin_with

from .conftest import MakeArgs, start_engine

OPTIONS = ["5", "3+4=7", "1+1+1"]
ROWS = [{"q": f"{a}+4=?", "options": OPTIONS[: 2 + a % 2], "right": a % 2} for a in range(6)]


@pytest.fixture
def dataset(tmp_path: Path, request: pytest.FixtureRequest) -> EvalDataset:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "pick.yaml").write_text(
        "name: pick\ndata: rows.jsonl\nkind: multiple-choice\nprompt: '{{ q }}'\nchoices: options\nlabel: right\n"
        f"metric: {request.param}\ndelimiter: ''\n"
    )
    spec = str(tmp_path / "pick.yaml")
    return EvalDataset(**load_task(spec).settings(spec, None, 0, chat=False))


def likelihoods(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, options: list[str]
) -> list[float]:
    """As lm-evaluation-harness has them: question and answer are encoded as the tokenizer says."""
    start, found = len(tokenizer(question)["input_ids"]), []
    for option in options:
        ids = torch.tensor([tokenizer(question + option)["input_ids"]])
        with torch.no_grad():
            log_probs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        found.append(float(log_probs.gather(1, ids[0, start:, None]).sum()))
    return found


@pytest.mark.parametrize("begins", [False, True], ids=["", "begins"])
@pytest.mark.parametrize("dataset", ["acc", "acc_norm", "acc_token"], indirect=True)
def test_the_likeliest_choice_is_the_response(
    make_args: MakeArgs,
    dataset: EvalDataset,
    model_folder: Path,
    tmp_path: Path,
    begins: bool,
) -> None:
    tokenizer = load_tokenizer(str(model_folder))
    if begins:
        begin_with(tokenizer, tokenizer.eos_token)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), dtype=torch.float32)
    model.save_pretrained(tmp_path / "weights")
    engine = start_engine(tmp_path / "weights", tokenizer)
    with closing(RolloutManager(make_args(eval_datasets=(dataset,)), [engine], tokenizer)) as manager:
        output = manager.evaluate(0)
    asyncio.run(engine.close())
    table, rewards = output.tables["pick"], []
    for row, ids in enumerate(tokenizer([row["q"] for row in ROWS])["input_ids"]):
        assert table.row_slice("prompt_tokens", row).tolist() == ids
    for row, asked in enumerate(ROWS):
        metadata = json.loads(table.metadata[row])
        truth = likelihoods(model, tokenizer, asked["q"], asked["options"])
        assert metadata["log_likelihoods"] == pytest.approx(truth, abs=1e-4)
        tokens = [len(tokenizer(option)["input_ids"]) - begins for option in asked["options"]]
        sizes = {"acc_norm": list(map(len, asked["options"])), "acc_token": tokens}
        lengths = sizes.get(dataset.metadata_overrides["metric"], [1] * len(tokens))
        best = max(range(len(truth)), key=lambda i: truth[i] / lengths[i])
        assert table.response[row] == asked["options"][best]
        assert float(table.row_slice("rollout_log_probs", row).sum()) == pytest.approx(truth[best], abs=1e-4)
        rewards.append(float(best == asked["right"]))
    assert table.reward.tolist() == rewards
    accuracy = sum(rewards) / len(rewards)
    assert output.metrics["eval/pick"] == pytest.approx(accuracy)
    chance = (3 / 2 + 3 / 3) / 6  # half of the rows have two options
    assert output.metrics["eval/pick-centred"] == pytest.approx((accuracy - chance) / (1 - chance))
    error = output.metrics["eval/pick-stderr"] / (1 - chance)
    assert output.metrics["eval/pick-centred-stderr"] == pytest.approx(error)


def test_what_follows_is_scored_after_each_choice_or_must_be_the_likeliest(
    make_args: MakeArgs, model_folder: Path, tmp_path: Path
) -> None:
    """Winograd's form and LAMBADA's, beside plain forward passes."""
    tokenizer = load_tokenizer(str(model_folder))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), dtype=torch.float32)
    model.save_pretrained(tmp_path / "weights")
    rows = [{"q": f"{a}+", "options": ["5", "3+4"], "end": f"={a}?", "right": a % 2} for a in range(6)]
    for number, row in enumerate(rows):  # what follows is the model's own greedy word in every second row
        ids = torch.tensor([tokenizer(row["q"])["input_ids"]])
        word = int(model(ids).logits[0, -1].argmax())
        row["next"] = tokenizer.decode([word if number % 2 else (word + 1) % len(tokenizer)])
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = "data: rows.jsonl\nprompt: '{{ q }}'\ndelimiter: ''\n"
    (tmp_path / "ends.yaml").write_text(
        f"name: ends\n{common}kind: multiple-choice\nchoices: options\nlabel: right\nshared: end\nmetric: acc_token\n"
    )
    (tmp_path / "next.yaml").write_text(f"name: next\n{common}kind: continuation\nlabel: next\n")
    specs = [str(tmp_path / f"{name}.yaml") for name in ("ends", "next")]
    datasets = tuple(EvalDataset(**load_task(spec).settings(spec, None, 0, chat=False)) for spec in specs)
    engine = start_engine(tmp_path / "weights", tokenizer)
    with closing(RolloutManager(make_args(eval_datasets=datasets), [engine], tokenizer)) as manager:
        output = manager.evaluate(0)
    asyncio.run(engine.close())
    ends, following = output.tables["ends"], output.tables["next"]
    for number, row in enumerate(rows):
        truth = [likelihoods(model, tokenizer, row["q"] + option, [row["end"]])[0] for option in row["options"]]
        assert json.loads(ends.metadata[number])["log_likelihoods"] == pytest.approx(truth, abs=1e-4)
        assert ends.reward[number] == float((truth[1] > truth[0]) == row["right"])
        (truth_next,) = likelihoods(model, tokenizer, row["q"], [row["next"]])
        assert json.loads(following.metadata[number])["log_likelihood"] == pytest.approx(truth_next, abs=1e-4)
    assert following.reward.tolist() == [0.0, 1.0] * 3
    assert output.metrics["eval/next"] == 0.5
    assert "eval/next-centred" not in output.metrics
