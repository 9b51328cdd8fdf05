"""The tab "Samples" in a real browser, on files of samples whose numbers are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from sampled_run import byte_level, sample, save, save_stats, write_run

from slimelite.apps.runs import Run
from slimelite.apps.view import write_page
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable
from tests.apps.conftest import OpenPage
from tests.tracking.fake_run import make_args, play_pairs

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

EVIL = "</script><img src=x onerror=\"document.title='owned'\"><!--"
NASTY = f"{EVIL} \x00 \x1b[31m \u202egnp.exe\u202c \ufeff\u200b 你好👩‍👩‍👧 end"
LINE = "na" * 500_000
CHAT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is {}?<|im_end|>\n<|im_start|>assistant\n"
CALL = '<think>use it</think><tool_call>{"a": 1}</tool_call><|im_end|>\n'
TURNS = f"{CALL}<|im_start|>user\n<tool_response>naïve 你</tool_response>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 rollouts of 8 groups of 4; rollout 2 has a sample of several turns; hostile texts in what was dropped."""
    home = tmp_path_factory.mktemp("home")
    tokenizer = byte_level(home / "model")
    folder = write_run(home / "run", home / "model", 6)
    for i in range(6):
        groups = []
        for g in range(8):
            prompt = CHAT.format(f"{g} + 7")
            answers = [f"it is {g + 7 - (k > i)} of {i}<|im_end|>" for k in range(4)]
            groups.append(
                [
                    sample(
                        tokenizer,
                        8 * i + g,
                        32 * i + 4 * g + k,
                        prompt,
                        answer,
                        {"right": float(k <= i), "form": g / 8},
                    )
                    for k, answer in enumerate(answers)
                ]
            )
        if i == 2:
            turns = groups[3][1] = sample(tokenizer, 19, 77, CHAT.format("x"), "", {"right": 1.0, "form": 0.0})
            ids = tokenizer.encode(TURNS, add_special_tokens=False).ids
            own = len(tokenizer.encode(TURNS.partition("<|im_start|>")[0], add_special_tokens=False).ids)
            turns.append_response_tokens(ids[:own], [-0.25] * own, weight_version=1)
            turns.append_response_tokens(tokens=ids[own:], trainable=False)
            turns.response, turns.status = TURNS, Sample.Status.TRUNCATED
        table = save(folder / "rollouts" / f"{i:07d}.parquet", groups, "right")
        if i in (2, 3):
            save_stats(folder / "token_stats" / f"{i:07d}.parquet", table, lambda row: row % 4 != 2)
        answers = [[sample(tokenizer, g, g, CHAT.format(f"{g} + 1"), f"{g}", float(g <= i))] for g in range(5)]
        save(folder / "eval" / f"sums-{i:07d}.parquet", answers)
    lost = [sample(tokenizer, 90 + i, 90 + i, text, text, 0.0) for i, text in enumerate([NASTY, "short"])]
    lost[0].metadata = {"dropped": EVIL, "note": [EVIL, "\ud800"]}
    lost[1].metadata, lost[1].label = {"dropped": "zero_std_0"}, EVIL
    lost[1].append_response_tokens([lost[1].tokens[-1]], [-1.0])
    lost[1].response = LINE + EVIL
    save(folder / "dropped" / "0000001.parquet", [[one] for one in lost])
    return folder


@pytest.fixture(scope="module")
def file(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "view.html"
    write_page([Run.read(run)], out)
    return out


def shown(page: Page) -> list[list[str]]:
    """The cells of the rows in sight."""
    page.locator(".rows .row").first.wait_for()
    return page.eval_on_selector_all(
        ".rows .row", "rows => rows.map((row) => [...row.children].map((cell) => cell.innerText))"
    )


def titles_of(page: Page) -> list[str]:
    return [title.strip() for title in page.locator(".row.head > span").all_inner_texts()]


def level(page: Page, name: str, said: str) -> None:
    """Wait until the button of a level has this text."""
    from playwright.sync_api import expect

    expect(page.locator(f"[data-level={name}]")).to_have_text(said)


def test_from_rollouts_to_groups_to_samples_and_back(file: Path, open_page: OpenPage) -> None:
    page = open_page(file, "samples")
    rows = shown(page)
    assert [row[0] for row in rows] == [f"rollout {i}" for i in range(6)]
    assert [row[2] for row in rows] == ["0.25", "0.5", "0.75", "1", "1", "1"]
    for text in ("Rollouts 6", "Groups 48", "Samples 192", "Prompts 9"):
        level(page, text.split()[0].lower(), text)
    page.locator(".rows .row").nth(2).click()
    level(page, "groups", "Groups 8")
    assert len(shown(page)) == 8
    page.locator(".rows .row").nth(3).click()
    level(page, "samples", "Samples 4")
    assert page.locator(".sample h3").inner_text() == "rollout 2 · sample 76"
    page.locator(".mate").nth(1).click()
    assert page.locator(".sample h3").inner_text() == "rollout 2 · sample 77"
    page.go_back()
    page.go_back()
    level(page, "rollouts", "Rollouts 6")
    page.locator(".row-box").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator(".chip").inner_text() == "rollout 1\n✕"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    level(page, "samples", "Samples 4")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.locator(".sample h3").inner_text() == "rollout 1 · sample 34"
    page.get_by_role("button", name="tokens").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.locator(".row.head [aria-sort=ascending]").inner_text() == "tokens ↑"


def test_samples_of_supervised_training_have_the_word_of_the_data_set_instead_of_a_reward(
    tmp_path: Path, open_page: OpenPage
) -> None:
    folder = tmp_path / "dpo"
    play_pairs(make_args(folder, loss_type="dpo_loss", num_rollout=2, eval_datasets=()), batches=2)
    page_file = tmp_path / "view.html"
    write_page([Run.read(folder)], page_file)
    page = open_page(page_file, "samples")
    assert [row[0] for row in shown(page)] == ["batch 0", "batch 1"]
    assert titles_of(page) == ["from", "samples", "tokens", "truncated"]
    level(page, "rollouts", "Batches 2")
    page.locator("[data-level=samples]").click()
    assert titles_of(page) == ["from", "reply", "tokens", "status", "prompt", "response"]
    assert [row[1] for row in shown(page)] == ["chosen", "rejected"] * 4
    assert "reward" not in page.get_by_label("Add a filter").inner_text()
    page.locator(".rows .row").nth(1).click()
    assert page.locator(".sample h3").inner_text() == "batch 0 · sample 1"
    assert page.locator(".sample-head .badge").all_inner_texts() == ["rejected", "completed"]
    assert page.locator(".sample .facts").inner_text().split("\n")[0] == "tokens"
    assert page.locator(".mate").all_inner_texts() == ["chosen", "rejected"]
    page.get_by_role("button", name="this prompt in all batches").click()
    page.locator(".side-by-side .card").first.wait_for()
    assert page.get_by_label("Which samples").last.input_value() == "all"
    assert "reward" not in page.locator(".side-by-side").inner_text()


@pytest.mark.parametrize("place", ["sample=-1", "sample=1.5", "level=toString", "run=7&sample=2000&rollout=1"])
def test_an_address_of_another_page_opens_the_lists(file: Path, open_page: OpenPage, place: str) -> None:
    page = open_page(file, f"samples?{place}")
    assert len(shown(page)) > 1
    assert page.locator(".sample").count() == 0


def test_rows_are_sorted_and_filtered_by_their_numbers(file: Path, open_page: OpenPage) -> None:
    page = open_page(file, "samples?level=samples")
    titles = titles_of(page)
    assert titles == ["from", "reward", "form", "right", "advantage", "tokens", "stale", "status", "prompt", "response"]
    page.get_by_role("button", name="tokens").click()
    assert shown(page)[0][titles.index("status")] == "truncated"
    lengths = [int(row[titles.index("tokens")].replace(",", "")) for row in shown(page)]
    assert lengths == sorted(lengths, reverse=True)
    page.get_by_role("button", name="tokens").click()
    assert int(shown(page)[0][titles.index("tokens")]) == min(int(row[5]) for row in shown(page)) < lengths[-1]

    page.get_by_label("Add a filter").select_option("form")
    page.get_by_label("form from").fill("0.8")
    level(page, "samples", "Samples 24")
    page.get_by_label("Add a filter").select_option("right")
    page.get_by_label("right to").fill("0.5")
    level(page, "samples", "Samples 6")
    page.get_by_label("Remove the filter form").click()
    level(page, "samples", "Samples 48")
    page.get_by_label("right from").fill("0.5")
    page.get_by_label("right to").fill("1000000000")
    level(page, "samples", "Samples 144")
    page.get_by_label("Remove the filter right").click()
    page.get_by_label("Add a filter").select_option("status")
    page.get_by_label("status", exact=True).select_option("truncated")
    level(page, "samples", "Samples 1")
    level(page, "rollouts", "Rollouts 1")
    page.get_by_label("Which samples").select_option("dropped")
    page.get_by_label("Remove the filter status").click()
    page.get_by_label("Add a filter").select_option("dropped because")
    page.get_by_label("dropped because", exact=True).select_option("zero_std_0")
    level(page, "samples", "Samples 1")


def test_an_episode_is_a_tree_over_time_with_the_log_of_its_program(tmp_path: Path, open_page: OpenPage) -> None:
    tokenizer = byte_level(tmp_path / "model")
    folder = write_run(tmp_path / "run", tmp_path / "model", 1)
    calls = {"role": 0, "tokens": 5, "calls": ["look", EVIL]}
    turns = [
        {**calls, "turn": 0, "parent": None, "begin": 0.0, "seconds": 1.0, "answer": 0.75, "call_seconds": [0.25, 0.5]},
        {**calls, "turn": 1, "parent": 0, "begin": 2.0, "seconds": 2.0},
        {**calls, "turn": 2, "parent": 0, "begin": 3.0, "seconds": 1.0},
        {**calls, "turn": 3, "parent": 1, "begin": 4.5, "seconds": 0.5},
        {**calls, "turn": 4, "parent": 3, "begin": EVIL, "seconds": 1.0},
    ]
    log = {"stdout": f"it says {EVIL}", "stderr": ""}
    facts = {"episode": {"turns": 4, "errors": 0, "timeline": turns, "log": log}, "town": "Bonn", "tags": {"a": [1, 2]}}
    broken = {"episode": {"timeline": [None, 3, {"turn": EVIL}], "log": {"stdout": [EVIL]}}}
    texts = [json.dumps(facts), json.dumps(broken)]
    groups = [[sample(tokenizer, i, i, "q", "a", 1.0, metadata=json.loads(text)) for i, text in enumerate(texts)]]
    save(folder / "rollouts" / "0000000.parquet", groups)
    write_page([Run.read(folder)], tmp_path / "view.html")
    page = open_page(tmp_path / "view.html", "samples?level=samples&sample=0")
    rows = page.locator(".episode-turns li")
    rows.first.wait_for()
    said = ["turn 0 begins", "turn 1 after 0", "turn 3 after 1", "↳ turn 2 after 0"]
    assert rows.locator(".node").all_inner_texts() == said
    assert page.locator(".episode .fact").all_inner_texts() == ["turns\n4"]
    assert rows.locator(".said").all_inner_texts()[:2] == [
        f"5 tokens, 1.0s look 0.25s{EVIL} 0.50s",
        f"5 tokens, 2.0s look{EVIL}",  # nobody measured its calls
    ]
    lane, bar = (rows.nth(1).locator(name).bounding_box() for name in (".lane", ".reply"))
    assert lane is not None
    assert bar is not None
    assert (bar["x"] - lane["x"]) / lane["width"] == pytest.approx(2 / 5, abs=0.01)
    assert bar["width"] / lane["width"] == pytest.approx(2 / 5, abs=0.01)
    assert EVIL in page.locator(".episode details").inner_text()
    assert EVIL in rows.first.inner_text()
    metadata = page.locator("details", has_text="Metadata").inner_text()
    assert metadata.split("\n") == ["Metadata", *("town", "Bonn"), *("tags", "a", "1, 2")]
    widths = "(bars) => bars.map((bar) => [bar.className, parseFloat(bar.style.left), parseFloat(bar.style.width)])"
    # an answer that was measured, and the time until the next request where none was
    assert rows.nth(0).locator(".bar").evaluate_all(widths) == [["bar reply", 0, 20], ["bar acts", 20, 15]]
    assert rows.nth(1).locator(".bar").evaluate_all(widths) == [["bar reply", 40, 40], ["bar acts", 80, 10]]
    page.goto((tmp_path / "view.html").as_uri() + "#samples?level=samples&sample=1")
    page.locator(".sample .episode h4").wait_for()
    assert page.locator(".episode-turns, .episode details").count() == 0
    page.get_by_role("tab", name="Agents").click()
    lines = page.locator(".episodes li")
    lines.nth(1).wait_for()
    assert lines.nth(0).locator(".bar").count() == 6
    assert lines.nth(0).inner_text().split("\n") == ["sample 0", "1", "4 turns, 5.0s"]
    cells = page.locator(".calls-table tr").all_inner_texts()
    assert cells[1:] == ["look\t4\t0.25s\t0.25s", f"{EVIL}\t4\t0.50s\t0.50s"]
    lines.nth(0).get_by_role("link", name="sample 0").click()
    page.locator(".sample .episode-turns").wait_for()
    assert page.locator("img").count() == 0
    assert page.title() == "slimelite"


def test_a_sample_is_found_by_its_text_and_the_hits_are_marked(file: Path, open_page: OpenPage) -> None:
    page = open_page(file, "samples?level=samples")
    search = page.get_by_role("searchbox")
    search.fill("NAÏVE 你")
    level(page, "samples", "Samples 1")
    row = page.locator(".rows .row")
    page.locator(".rows mark").wait_for()
    assert row.locator("mark").inner_text() == "naïve 你"
    row.click()
    page.locator(".sample .hit").first.wait_for()
    assert "".join(page.locator(".sample .hit").all_inner_texts()).strip() == "naïve 你"
    search.fill("7 + 7")  # in a prompt
    level(page, "samples", "Samples 24")
    search.fill("nowhere")
    page.get_by_text("no sample contains it").wait_for()


def test_each_token_has_its_text_and_the_numbers_of_the_parquet_files(
    run: Path, file: Path, open_page: OpenPage
) -> None:
    page = open_page(file, "samples?rollout=2&level=samples")
    table = SampleTable.from_parquet(run / "rollouts" / "0000002.parquet")
    row = table.sample_id.tolist().index(77)
    page.goto(file.as_uri() + f"#samples?level=samples&number=2&sample={2 * 32 + row}")
    page.locator("b.token[class]").first.wait_for()
    spans = page.eval_on_selector_all(
        ".tokens b.token", "nodes => nodes.map((node) => [node.span.text, node.span.tokens, node.className])"
    )
    assert "".join(text for text, _, _ in spans) == TURNS
    assert [k for _, tokens, _ in spans for k in tokens] == list(range(table.response_lengths[row]))
    assert any(len(tokens) > 1 for _, tokens, _ in spans)  # "你" is several tokens, and one character
    mask = table.row_slice("loss_mask", row)
    assert [("masked" in names.split()) for _, _, names in spans] == [not mask[tokens[0]] for _, tokens, _ in spans]
    assert page.locator(".tokens .turn .role").all_inner_texts() == ["assistant", "user"]
    assert page.locator(".tokens .block.think").inner_text() == "<think>use it</think>"
    assert "naïve 你" in page.locator(".tokens .block.tool_response").inner_text()

    def numbers(k: int) -> dict[str, str]:
        page.locator(".tokens b.token").nth(k).hover()
        return dict(
            page.eval_on_selector_all(
                ".token-box tr", "rows => rows.map((row) => [row.dataset.measure, row.children[1].innerText])"
            )
        )

    engine, tool = numbers(0), numbers(len(spans) - 1)
    assert engine["engine"] == "−0.250 (77.88 %)"
    assert engine["difference"] == "−0.0123"
    assert engine["trainer"] == "−0.262"
    assert engine["entropy"] == "0.500"
    assert engine["version"] == "1"
    assert engine["mask"] == "yes"
    assert float(engine["advantage"]) == pytest.approx(table.advantage[row], abs=5e-4)
    assert tool["engine"] == "– no engine sampled it"
    assert tool["mask"] == "no"
    page.locator(".tokens").focus()
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".token-box .head").inner_text().startswith("2 ")

    # the next sample of the group has no row in token_stats: that is shown, and is no colour
    page.locator(".mate").nth(2).click()
    page.get_by_text("sample 78", exact=False).first.wait_for()
    assert numbers(0)["engine"] == "−0.001 (99.9 %)"
    assert "difference" in numbers(0)
    assert numbers(0)["difference"] == "– not computed"
    page.get_by_label("Colour of the tokens").select_option("difference")
    assert page.locator(".tokens b.none").count() == page.locator(".tokens b").count()
    assert page.get_by_text("no value").is_visible()
    page.get_by_label("Colour of the tokens").select_option("engine")
    assert page.locator(".tokens b.none").count() == 0


def test_one_prompt_through_the_run_side_by_side(file: Path, open_page: OpenPage) -> None:
    page = open_page(file, "samples?level=prompts")
    page.get_by_role("button", name="change").click()
    rows = shown(page)
    assert rows[0][:4] == ["6", "0.25", "1", "0.75"]
    page.locator(".rows .row", has_text="What is 5 + 7?").click()
    cards = page.locator(".side-by-side article")
    assert cards.count() == 6
    page.get_by_text("it is 12 of 5").wait_for()
    page.get_by_label("Which samples", exact=True).last.select_option("worst")
    page.get_by_text("it is 11 of 0").wait_for()
    assert cards.locator(".head .link").all_inner_texts() == [f"rollout {i}" for i in range(6)]
    assert cards.locator(".fact:first-child b").all_inner_texts() == ["0", "0", "0", "1", "1", "1"]
    cards.nth(1).locator(".head .link").click()
    assert page.locator(".sample h3").inner_text() == "rollout 1 · sample 54"
    assert cards.locator(".fact:first-child b").all_inner_texts() == ["0", "0", "0", "1", "1", "1"]
    page.get_by_label("Leave one prompt").click()
    page.get_by_label("Which samples").first.select_option("eval sums")
    level(page, "rollouts", "Evaluations 6")
    page.locator("[data-level=rollouts]").click()
    assert shown(page)[0][0].startswith("sums after rollout")


def test_hostile_texts_are_texts(file: Path, open_page: OpenPage) -> None:
    page = open_page(file, "samples?level=samples&of=dropped")
    page.locator(".rows .row").first.click()
    page.locator(".tokens b").first.wait_for()
    text = "".join(page.eval_on_selector_all(".tokens b.token", "nodes => nodes.map((node) => node.span.text)"))
    assert text == NASTY
    assert EVIL in page.locator(".sample .text").first.inner_text()
    assert "U+202E" in page.locator(".tokens").inner_text()
    assert "U+0000" in page.locator(".tokens").inner_text()
    assert EVIL in page.locator(".sample details").inner_text()
    assert page.locator(".sample .badge.bad").inner_text() == EVIL
    page.locator(".rows .row").nth(1).click()
    page.get_by_text("more: ").wait_for()
    assert "The response is not the text of its tokens" in page.locator(".sample").inner_text()
    assert page.locator(".sample .label").inner_text() == EVIL
    assert len(page.locator(".sample .text").nth(1).inner_text()) >= 50_000
    page.get_by_role("searchbox").fill("onerror")
    page.locator(".rows mark").first.wait_for()
    assert page.locator("img, script:not(#data):not(body > script)").count() == 0
    assert page.title() == "slimelite"


SYSTEM, USER, ANSWER = ("system", "S"), ("user", "Q?"), ("assistant", "A")


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ?<|im_end|>\n<|im_start|>assistant\n", [SYSTEM, USER]),
        (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nQ?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>",
            [USER, ANSWER],
        ),
        ("<bos><start_of_turn>user\nQ?<end_of_turn>\n<start_of_turn>model\nA", [USER, ANSWER]),
        (
            "<|start|>system<|message|>S<|end|><|start|>user<|message|>Q?<|end|>"
            "<|start|>assistant<|channel|>final<|message|>A<|return|>",
            [SYSTEM, USER, ANSWER],
        ),
        ("<|system|>\nS<|end|>\n<|user|>\nQ?<|end|>\n<|assistant|>\nA<|end|>", [SYSTEM, USER, ANSWER]),
        ("<｜begin▁of▁sentence｜><｜User｜>Q?<｜Assistant｜>A<｜end▁of▁sentence｜>", [USER, ANSWER]),
        ("<s>[INST] Q?[/INST] A</s>", [USER, ANSWER]),
        (json.dumps([{"role": "user", "content": [{"type": "text", "text": "Q?"}]}]), [USER]),
        ("[{ is no JSON", [(None, "[{ is no JSON")]),
        ("Q?", [(None, "Q?")]),
    ],
)
def test_prompts_of_known_templates_are_turns(
    file: Path, open_page: OpenPage, text: str, turns: list[tuple[str, str]]
) -> None:
    page = open_page(file)
    page.evaluate("text => document.body.append(promptElement(text, ''))", text)
    found = [
        (turn.get_attribute("data-role"), turn.locator(".block").inner_text()) for turn in page.locator(".turn").all()
    ]
    assert found == turns


def test_a_text_of_nothing_but_marks_is_no_burden(file: Path, open_page: OpenPage) -> None:
    page = open_page(file)
    page.evaluate("document.body.append(promptElement('<|im_start|>user\\n<think>x</think>'.repeat(40000), 'x'))")
    assert page.locator(".turn").count() <= 501
    assert page.evaluate("document.querySelectorAll('*').length") < 10_000


def test_without_the_tokenizer_the_page_says_so_and_shows_the_responses(
    run: Path, tmp_path: Path, open_page: OpenPage
) -> None:
    config = json.loads((run / "config.json").read_text())
    copy = tmp_path / "copy"
    (copy / "rollouts").mkdir(parents=True)
    for name in ("metrics.jsonl", "rollouts/0000000.parquet"):
        (copy / name).write_bytes((run / name).read_bytes())
    (copy / "config.json").write_text(json.dumps({**config, "tokenizer": "gone/model", "hf_checkpoint": "gone/model"}))
    write_page([Run.read(copy), Run.read(run)], tmp_path / "two.html")
    page = open_page(tmp_path / "two.html", "samples?level=samples&sample=0")
    page.get_by_text("tokenizer does not exist any more (no tokenizer.json in gone/model)").wait_for()
    page.get_by_text("it is 7 of 0<|im_end|>").last.wait_for()
    assert page.locator(".tokens").count() == 0
    page.get_by_label("Run", exact=True).select_option("1")
    page.locator(".rows .row").nth(5).wait_for()
    level(page, "rollouts", "Rollouts 6")


def test_a_page_of_20_000_samples_shows_those_in_sight(tmp_path: Path, open_page: OpenPage) -> None:
    tokenizer = byte_level(tmp_path / "model")
    run = write_run(tmp_path / "run", tmp_path / "model", 80)
    groups = [
        [sample(tokenizer, g, 8 * g + k, CHAT.format(g), f"it is {g} and {k}", float(k % 2)) for k in range(8)]
        for g in range(32)
    ]
    table = SampleTable.from_samples(groups)
    rng = np.random.default_rng(0)
    for i in range(80):
        table.rollout_log_probs[:] = -rng.exponential(0.5, len(table.rollout_log_probs))
        table.to_parquet(run / "rollouts" / f"{i:07d}.parquet")
        save_stats(run / "token_stats" / f"{i:07d}.parquet", table)
    out = tmp_path / "view.html"
    write_page([Run.read(run)], out)
    assert out.stat().st_size < 5_000_000
    page = open_page(out)
    page.get_by_role("tab", name="Samples").click()
    page.locator(".rows .row").first.wait_for()
    page.locator("[data-level=samples]").click()
    level(page, "samples", "Samples 20,480")
    assert page.locator(".rows .row").count() < 100
