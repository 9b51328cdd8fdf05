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
@pytest.mark.parametrize("dataset", ["acc", "acc_norm"], indirect=True)
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
        lengths = [
            len(option) if dataset.metadata_overrides["metric"] == "acc_norm" else 1 for option in asked["options"]
        ]
        best = max(range(len(truth)), key=lambda i: truth[i] / lengths[i])
        assert table.response[row] == asked["options"][best]
        assert float(table.row_slice("rollout_log_probs", row).sum()) == pytest.approx(truth[best], abs=1e-4)
        rewards.append(float(best == asked["right"]))
    assert table.reward.tolist() == rewards
    assert output.metrics["eval/pick"] == pytest.approx(sum(rewards) / len(rewards))
