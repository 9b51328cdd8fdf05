"""Build time, size and load time of the page of ``slimelite view``, for run folders with made-up samples.

    python scripts/benchmarks/page.py --rollouts 80 --samples 256
    python scripts/benchmarks/page.py --rollouts 1000 --samples 512

*Built* is the wall time of the whole command, with Python's start, and its processor time. *Usable* is the time from
opening the file in headless chromium to the answer to a click, when the curves are drawn. The default length of
responses is that of the quickstart.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from playwright.sync_api import sync_playwright
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from slimelite.arguments import Args
from slimelite.base.version import add_version
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable
from slimelite.tracking.metrics_file import MetricsFile
from slimelite.tracking.panels import GROUPS
from slimelite.tracking.run_folder import RunFolder, versions

GROUP = 8  # samples of a prompt
WORDS = 4000
VARIANTS = 16  # so many rollouts are made, and then copied
OTHERS = 60  # metrics that are in no panel


def make_run(folder: Path, rollouts: int, samples: int, length: int) -> None:
    """A run folder with ``rollouts`` rollouts of ``samples`` samples, each with about ``length`` response tokens."""
    chance = random.Random(0)
    names = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 8))) for _ in range(WORDS)]
    words = {f"Ġ{name}": i for i, name in enumerate(dict.fromkeys(names))}
    args = Args(run_dir=str(folder), hf_checkpoint=str(folder / "model"), rollout_batch_size=samples // GROUP)
    run = RunFolder(folder)
    run.save_config(args)
    run.save_json("versions.json", versions("cpu"))
    progress = {"status": "finished", "rollouts_done": rollouts, "num_rollout": rollouts, "message": None}
    run.save_json("status.json", progress | {"began": time.time() - 60 * rollouts, "updated": time.time()})
    tokenizer = Tokenizer(WordLevel(words, unk_token=next(iter(words))))
    tokenizer.decoder = decoders.ByteLevel()
    (folder / "model").mkdir()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    made = [make_table(list(words), samples, length, variant) for variant in range(min(VARIANTS, rollouts))]
    (folder / "token_stats").mkdir()
    for i in range(rollouts):
        path, source = folder / "rollouts" / f"{i:07d}.parquet", i % len(made)
        if i == source:
            run.save_rollout(i, made[source])
            save_token_stats(folder / "token_stats" / path.name, made[source])
            continue
        for kind in ("rollouts", "token_stats"):
            shutil.copy(folder / kind / f"{source:07d}.parquet", folder / kind / path.name)
    save_metrics(folder, rollouts)


def make_table(words: list[str], samples: int, length: int, seed: int) -> SampleTable:
    """Samples whose words have Zipf's frequencies, and whose log-probs have every size."""
    chance = np.random.default_rng(seed)
    groups = []
    for g in range(samples // GROUP):
        group = []
        prompt = f"Question {g}: " + " ".join(words[i][1:] for i in chance.integers(len(words), size=30))
        for i in range(GROUP):
            sample = Sample(group_index=g, index=g * GROUP + i, prompt=prompt, tokens=list(range(40)))
            tokens = np.minimum(chance.zipf(1.3, max(1, int(chance.gamma(4, length / 4)))), len(words)) - 1
            text = "".join(f" {words[t][1:]}" for t in tokens)
            sample.append_response_tokens(tokens.tolist(), (-chance.exponential(0.5, len(tokens))).tolist(), text=text)
            sample.label, sample.reward = str(g), float(chance.random() < 0.5)
            sample.status = Sample.Status.COMPLETED
            group.append(sample)
        groups.append(group)
    return SampleTable.from_samples(groups)


def save_token_stats(path: Path, table: SampleTable) -> None:
    """The trainer's log-probs and entropies, near the engine's."""
    chance = np.random.default_rng(0)
    offsets = table.response_offsets.astype(np.int32)
    near = (table.rollout_log_probs + chance.normal(0, 0.01, len(table.response_tokens))).astype(np.float32)
    columns = {"log_probs": near, "entropy": chance.exponential(0.4, len(near)).astype(np.float32)}
    lists = {name: pa.ListArray.from_arrays(offsets, values) for name, values in columns.items()}
    pq.write_table(pa.table({"sample_id": table.sample_id, **lists}), path)


def save_metrics(folder: Path, rollouts: int) -> None:
    """A random walk for every metric of the page's panels and for ``OTHERS`` more."""
    names = [metric for panels in GROUPS.values() for panel in panels for metric in panel.metrics]
    names += [f"rollout/other_{i}" for i in range(OTHERS)]
    names += [f"perf/{phase}_time" for phase in ("rollout", "train", "update_weights", "actor_train", "log_probs")]
    walks = np.abs(np.random.default_rng(0).normal(size=(len(dict.fromkeys(names)), rollouts)).cumsum(axis=1))
    writer = MetricsFile(folder)
    writer.write("start", {"rollout/step": 0, "eval/step": -1})
    for i in range(rollouts):
        values = dict(zip(dict.fromkeys(names), walks[:, i].tolist(), strict=True))
        writer.write("train", {"rollout/step": i, "train/step": i, **values})
        if i % 10 == 9:
            writer.write("eval", {"eval/step": i, "eval/heldout": i / rollouts, "eval/heldout-stderr": 0.02})
    writer.close(False)


def usable(file: Path, rounds: int) -> list[float]:
    """Seconds from opening ``file`` until a click has shown its curves. Each measurement has a new tab."""
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    took = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(rounds + 1):
            page = browser.new_page()
            began = time.perf_counter()
            page.goto(file.as_uri())
            page.get_by_role("tab", name="Curves").click()
            page.locator(".chart .line").first.wait_for()
            took.append(time.perf_counter() - began)
            page.close()
        browser.close()
    return took[1:]


def processor_seconds() -> float:
    """Processor seconds of the ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Make the run folder, build the page and open it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    parser.add_argument("--rollouts", type=int, default=80)
    parser.add_argument("--samples", type=int, default=256, help="of a rollout")
    parser.add_argument(
        "--length", type=int, default=21, help="mean response tokens of a sample; the quickstart has 21"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", help="write the run and view.html into this folder, which must not exist")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.keep or Path(scratch) / "run")
        make_run(folder, args.rollouts, args.samples, args.length)
        stored = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
        out, built, busy = folder / "view.html", [], []
        for _ in range(args.rounds):
            began, before = time.perf_counter(), processor_seconds()
            subprocess.run([sys.executable, "-m", "slimelite.apps.command", "view", folder, "-o", out], check=True)
            built.append(time.perf_counter() - began)
            busy.append(processor_seconds() - before)
        print(f"{args.rollouts} rollouts x {args.samples} samples, {stored / 1e6:.0f} MB of parquet")
        print(f"built  {statistics.median(built):.2f} s (of {args.rounds}: {min(built):.2f} to {max(built):.2f})")
        print(f"       {statistics.median(busy):.2f} s of the processor ({min(busy):.2f} to {max(busy):.2f})")
        print(f"size   {out.stat().st_size / 1e6:.2f} MB")
        opened = usable(out, args.rounds)
        print(f"usable {statistics.median(opened):.2f} s (of {args.rounds}: {min(opened):.2f} to {max(opened):.2f})")


if __name__ == "__main__":
    main()
