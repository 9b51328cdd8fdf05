"""Rows with two replies: the usual formats give the same pairs, the loss sees what differs, and mistakes are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slimelite.arguments import Args
from slimelite.data.conversations import ChatReader
from slimelite.data.prompts import DataSource, deal, load_prompts
from slimelite.samples.sample import Sample, Status
from slimelite.samples.table import SampleTable

from .tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()
USER = {"role": "user", "content": "2+2?"}
GOOD, BAD = ({"role": "assistant", "content": answer} for answer in ("4", "it is 5"))
AGAIN = {"role": "user", "content": "sure?"}

Load = Callable[..., list[Sample]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """``load(row, ...)``: the pairs of a jsonl file."""

    def from_rows(*rows: dict[str, Any], skip: bool = False, **given: Any) -> list[Sample]:
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_pairs(Args(**{"input_key": "prompt"} | given), path, skip_bad_rows=skip)

    return from_rows


def load_pairs(args: Args, path: Path, tokenizer: Any = TOKENIZER, **given: Any) -> list[Sample]:
    return load_prompts(args, tokenizer, [str(path)], replies=(args.chosen_key, args.rejected_key), **given)


def samples_of(prompt: Sample, **given: Any) -> list[Sample]:
    return ChatReader(TOKENIZER, **given).pair(deal(prompt, 3, 3))


@pytest.mark.parametrize(
    ("row", "given"),
    [
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, {}),
        ({"prompt": [USER], "chosen": "4", "rejected": "it is 5"}, {}),
        ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"prompt": "2+2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"prompt": "2+2?", "chosen": "4", "rejected": "it is 5"}, {"apply_chat_template": True}),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, {"apply_chat_template": True}),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {"input_key": "chosen"}),
        ({"q": [USER], "yes": [GOOD], "no": "it is 5"}, {"input_key": "q", "chosen_key": "yes", "rejected_key": "no"}),
    ],
)
def test_every_usual_format_is_the_same_pair(load: Load, row: dict[str, Any], given: dict[str, Any]) -> None:
    (prompt,) = load(row, **given)
    pair = samples_of(prompt)
    for side, conversation in zip(pair, ([USER, GOOD], [USER, BAD]), strict=True):
        ids, mask = ChatReader(TOKENIZER).tokens(conversation)
        assert side.tokens == ids
        assert [0] * side.prompt_length + side.loss_mask == mask
        side.check_aligned()
    assert [side.response for side in pair] == ["4<|im_end|>\n", "it is 5<|im_end|>\n"]
    assert [side.label for side in pair] == ["chosen", "rejected"]
    assert pair[0].reward > pair[1].reward
    assert [(side.group_index, side.index, side.rollout_id, side.unit_id) for side in pair] == [
        (3, 6, 3, 3),
        (3, 7, 3, 3),
    ]


def test_parquet_rows_whose_keys_differ(tmp_path: Path) -> None:
    """A key of one message is null in all others there."""
    path = tmp_path / "pairs.parquet"
    rows = [{"prompt": [USER], "chosen": [{**GOOD, "name": "x"}], "rejected": [USER, BAD]}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    (prompt,) = load_pairs(Args(input_key="prompt"), path)
    assert [side.response for side in samples_of(prompt)] == ["4<|im_end|>\n", "it is 5<|im_end|>\n"]


def test_what_both_conversations_start_with_is_not_trained_on(load: Load) -> None:
    """Of several turns each trains the assistant's own, after the place where the two part."""
    first = {"role": "assistant", "content": "let me see"}
    row = {"chosen": [USER, first, AGAIN, GOOD, AGAIN, GOOD], "rejected": [USER, first, AGAIN, BAD]}
    chosen, rejected = samples_of(load(row, input_key="chosen")[0])
    assert chosen.prompt == rejected.prompt
    assert "let me see" in chosen.prompt
    trained = [t for t, m in zip(chosen.tokens[-chosen.response_length :], chosen.loss_mask, strict=True) if m]
    assert TOKENIZER.decode(trained) == "4<|im_end|>\n" * 2
    assert TOKENIZER.decode(rejected.tokens[-rejected.response_length :]) == "it is 5<|im_end|>\n"


def test_a_reply_that_goes_on_where_the_other_ends(load: Load) -> None:
    (prompt,) = load({"prompt": [USER], "chosen": [GOOD], "rejected": [GOOD, AGAIN, BAD]})
    assert all(sum(side.loss_mask) for side in samples_of(prompt))


def test_plain_text_ends_with_the_end_of_sequence(load: Load) -> None:
    (prompt,) = load({"prompt": "2+2=", "chosen": "4", "rejected": "five"})
    for side, reply in zip(samples_of(prompt), ("4", "five"), strict=True):
        assert side.tokens == [*TOKENIZER.encode("2+2=" + reply), TOKENIZER.eos_token_id]
        assert side.loss_mask == [1] * (len(reply) + 1)
        assert side.prompt == "2+2="
    chosen, rejected = samples_of(prompt, max_context_len=6)
    assert (chosen.status, rejected.status) == (Status.COMPLETED, Status.TRUNCATED)
    assert len(rejected.tokens) == 6


END = "<|im_end|>"


@pytest.mark.parametrize("end", [END, f"{END}\n", f"{END}{END}", "</s>"])
def test_a_reply_that_has_its_end_token_gets_no_other(load: Load, end: str) -> None:
    """As the responses of saved rollouts do; the chat template writes it, or the reader of plain text."""
    whole = [USER, {**GOOD, "content": "4" + end}]
    for row, given in (
        ({"prompt": [USER], "chosen": "4" + end, "rejected": "it is 5"}, {}),
        ({"chosen": whole, "rejected": [USER, BAD]}, {"input_key": "chosen"}),
    ):
        assert [side.response for side in samples_of(load(row, **given)[0])] == [f"4{END}\n", f"it is 5{END}\n"]


def test_plain_text_that_has_its_end_token_gets_no_other(load: Load) -> None:
    (prompt,) = load({"prompt": "2+2=", "chosen": f"4{END}", "rejected": "five</s>"})
    assert [side.response for side in samples_of(prompt)] == [f"4{END}", "five</s>"]
    # another special token is what the model says, and not an end
    (prompt,) = load({"prompt": "2+2=", "chosen": "4</tool_call>", "rejected": "five"})
    assert [side.response for side in samples_of(prompt)] == ["4</tool_call></s>", "five</s>"]


def test_a_pair_without_a_token_on_one_side_is_removed_whole(load: Load) -> None:
    for row, limit in (
        ({"prompt": "2+2=", "chosen": "4", "rejected": "five"}, 4),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [{**BAD, "step_loss_mask": 0}]}, None),
    ):
        assert [s.remove_sample for s in samples_of(load(row)[0], max_context_len=limit)] == [True, True]


def test_tools_and_template_settings_reach_the_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer("{{ tools[0].name if tools }}{{ mood }}" + TOKENIZER.chat_template)
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": [USER], "chosen": "4", "rejected": "5", "fns": [{"name": "ls"}]}))
    (prompt,) = load_pairs(Args(input_key="prompt", tool_key="fns"), path, tokenizer)
    sample = Sample(index=0, group_index=0, metadata=prompt.metadata)
    for side in ChatReader(tokenizer, template_kwargs={"mood": "calm"}).pair(sample):
        assert side.prompt.startswith("lscalm<|im_start|>")


WHOLE = {"prompt": [USER], "chosen": "4", "rejected": "5"}


@pytest.mark.parametrize(
    ("row", "given", "says"),
    [
        ({"prompt": [USER], "chosen": "4"}, {}, "no column 'rejected'"),
        (WHOLE | {"chosen": ""}, {}, "column 'chosen': the reply is empty"),
        (WHOLE | {"rejected": None}, {}, "column 'rejected': the reply is empty"),
        (WHOLE | {"rejected": 5}, {}, "column 'rejected': text or a list of messages is expected, not 5"),
        (WHOLE | {"rejected": "4"}, {}, "column 'rejected': the reply equals 'chosen'"),
        (WHOLE | {"chosen": [AGAIN, GOOD]}, {}, "column 'chosen': the reply starts with a user message that is not"),
        (WHOLE | {"chosen": [USER]}, {}, "column 'chosen': the conversation does not end with a message"),
        (WHOLE | {"chosen": [{"role": "assistant"}]}, {}, r"message 0 \(assistant\) is empty"),
        (WHOLE, {"input_key": "chosen"}, "column 'chosen': the replies are text, and do not contain the prompt"),
        ({"chosen": [GOOD], "rejected": [BAD]}, {"input_key": "chosen"}, "no message before the first assistant"),
    ],
)
def test_bad_rows_are_named_or_skipped(load: Load, row: dict[str, Any], given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=rf"pairs.jsonl: 1 of 1 rows is malformed: row 0 \(line 1\): .*{says}"):
        load(row, **given)
    good = {"chosen": [USER, GOOD], "rejected": [USER, BAD]} if given else WHOLE
    assert len(load(good, row, good, skip=True, **given)) == 2


def test_the_source_deals_pairs_and_knows_when_they_changed(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({**WHOLE, "rejected": f"{i}"}) + "\n" for i in range(5, 8)))
    args = Args(loss_type="dpo_loss", prompt_data=[str(path)], input_key="prompt")
    source = DataSource(args, TOKENIZER)
    table = SampleTable.from_samples([ChatReader(TOKENIZER).pair(group[0]) for group in source.get_samples(3)])
    assert table.unit_id.tolist() == table.rollout_id.tolist() == [0, 0, 1, 1, 2, 2]
    assert table.sample_id.tolist() == list(range(6))
    assert SampleTable.from_samples(table.to_samples()).unit_id.tolist() == table.unit_id.tolist()
    state = source.state_dict()
    path.write_text(path.read_text().replace('"7"', '"8"'))
    with pytest.raises(ValueError, match="its data has changed"):
        DataSource(args, TOKENIZER).load_state_dict(state)


def test_a_source_without_pairs_is_told() -> None:
    with pytest.raises(ValueError, match=r"metadata\['pair'\]"):
        ChatReader(TOKENIZER).pair(Sample(index=0, group_index=0, prompt=[USER]))
