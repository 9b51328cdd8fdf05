"""What a dry run says of memory, time and traffic; the formulas are compared with simulated steps in tests/gpu_sim."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen2Config

from slimelite.arguments import Args, ArgumentError, make_args
from slimelite.cluster.workers import EngineFactory
from slimelite.engines.embedded.engine import GPU_CACHE_SHARE
from slimelite.engines.sglang.server import server_fields
from slimelite.plan import run as planning
from slimelite.plan import time
from slimelite.plan.devices import Machine, gpus, planned, recognized, this_machine
from slimelite.plan.memory import CONTEXT, EMBEDDED_CACHE, NCCL, USABLE, Load, Sglang, Shapes, largest, peak, total
from slimelite.plan.report import plan_lines, verdict
from slimelite.plan.run import Plan
from slimelite.plan.time import Work

MODELS = Path(__file__).parents[2] / "models"
RUN = (
    "--tokenizer t --prompt-data p.jsonl --num-rollout 1000 --rollout-batch-size 32 --n-samples-per-prompt 8 --dry-run "
    "--rollout-max-prompt-len 512 --rollout-max-response-len 4096 --use-dynamic-batch-size --max-tokens-per-gpu 9216 "
)


def is_time(line: str) -> bool:
    return line.startswith("how fast")


def run(model: str, words: str) -> tuple[Args, Machine]:
    """Arguments for a model of models/*.sh, and the machine that they plan for."""
    shape = shlex.split(
        (MODELS / f"{model}.sh").read_text().partition("MODEL_ARGS=(")[2].partition(")")[0], comments=True
    )
    args = make_args([*shape, *(RUN + words).split()])
    return args, this_machine(args.plan_gpu)


def plan(model: str, words: str) -> Plan:
    found = Plan.of(*run(model, words))
    assert isinstance(found, Plan)
    return found


# (card in GB, LoRA rank, config): layers, hidden size, width of the MLP, heads, heads of keys
SMALL_CARDS = {"Qwen2.5-7B": (12, 16, (28, 3584, 18944, 28, 4)), "Qwen2.5-32B": (24, 8, (64, 5120, 27648, 40, 8))}
SHAPE = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


@pytest.mark.parametrize("loss", ["sft_loss", "dpo_loss"])
@pytest.mark.parametrize("model", SMALL_CARDS)
def test_qlora_fits_small_cards_and_an_engine_counts_its_copy(tmp_path: Path, model: str, loss: str) -> None:
    gib, rank, shape = SMALL_CARDS[model]
    config = Qwen2Config(vocab_size=152064, tie_word_embeddings=False, **dict(zip(SHAPE, shape, strict=True)))
    config.save_pretrained(tmp_path)

    def planned_load(words: str) -> Load:
        args = make_args(f"--hf-checkpoint {tmp_path} --plan-gpu rtx4090:1 {RUN}{words}".split())
        found = Plan.of(args, this_machine(args.plan_gpu))
        assert isinstance(found, Plan)
        weights = found.phases().get("generate", {}).get("weights", 0)
        # an engine has them in bf16, whatever the trainer has
        assert weights > 0.95 * 2 * found.load.shapes.parameters or "--debug-train-only" in words
        return found.load

    planned_load("--colocate --rollout-backend sglang")
    room = gib * 2**30 * USABLE
    words = f"--debug-train-only --loss-type {loss} --lora-rank {rank} --gradient-checkpointing "
    words += f"--ref-load {tmp_path} " * (loss == "dpo_loss")
    loads = [planned_load(words + more) for more in ("--load-in-4bit", "")]
    needs = [peak(replace(load, tokens=512)) for load in loads]
    assert needs[0] < room < needs[1]
    row = re.search(
        rf"{model}, rank {rank} .*SFT and DPO on a card of {gib} GB: micro-batches of ([\d,]+) tokens",
        (MODELS.parent / "docs" / "lora.md").read_text(),
    )
    assert row is not None
    assert largest(loads[0], room) == int(row[1].replace(",", ""))


def test_the_verdict_comes_first_and_the_tables_fit_a_terminal() -> None:
    for words in ("--colocate --plan-gpu h100:8", "--plan-gpu a100-80:8 --rollout-num-gpus 2", "--device cpu"):
        lines = "\n".join(plan_lines(*run("qwen2.5-7B", words))).splitlines()
        assert lines[0] == "will it fit (predicted)"
        assert lines[1].strip().startswith(("fits: ", "does not fit: "))
        assert max(map(len, lines[2:])) <= 110
    assert any(line.startswith("  train ") for line in lines)


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("LoRA on one card of 24 GB", "--max-tokens-per-gpu 4608 --colocate --lora-rank 16 --plan-gpu rtx4090:1"),
        ("all weights, on eight cards of 80 GB", "--colocate --plan-gpu h100:8"),
    ],
)
def test_the_page_shows_what_is_planned(title: str, words: str) -> None:
    section = (MODELS.parent / "docs" / "planner.md").read_text().partition(f"{title}\n")[2]
    assert "\n".join(plan_lines(*run("qwen2.5-7B", words))) == section.split("```")[1].strip("\n")


def test_what_is_said_to_fit_fits() -> None:
    """Each remedy, given as flags, makes the verdict that of a run that fits."""
    words = "--colocate --plan-gpu rtx4090:1"
    first = verdict(plan("qwen2.5-7B", words))
    assert first.startswith("does not fit: train needs 1")
    assert "--lora-rank 16 --max-tokens-per-gpu 5120" in first
    assert verdict(plan("qwen2.5-7B", f"{words} --lora-rank 16 --max-tokens-per-gpu 5120")).startswith("fits: ")
    tight = "--colocate --plan-gpu l40s:8 --no-gradient-checkpointing"
    found = plan("qwen2.5-7B", tight)
    assert found.remedies()
    for remedy in found.remedies():
        assert verdict(plan("qwen2.5-7B", f"{tight} {remedy}")).startswith("fits: "), remedy


def test_a_trainer_and_an_engine_that_do_not_fit_need_a_change_each() -> None:
    said = verdict(plan("qwen3-32B", "--colocate --plan-gpu l40s:8"))
    assert "--lora-rank 16" in said
    assert "; and sync needs 71" in said
    assert said.endswith("; --rollout-num-gpus-per-engine 2 would fit")
    both = "--colocate --plan-gpu l40s:8 --lora-rank 16 --rollout-num-gpus-per-engine 2"
    assert verdict(plan("qwen3-32B", both)).startswith("fits: ")
    alone = verdict(plan("qwen3-32B", "--debug-rollout-only --plan-gpu l40s:1"))
    assert alone.endswith("; --rollout-num-gpus-per-engine 2 on 2 GPUs would fit")


def test_what_an_engine_needs_at_least_is_not_its_row_of_the_table() -> None:
    found = plan("qwen2.5-0.5B", "--debug-rollout-only --rollout-backend sglang --plan-gpu h100:1 --rollout-num-gpus 1")
    least = found.needs()["generate"][0]
    assert verdict(found).startswith(f"fits: generate needs most, at least {least / 1e9:.1f} of the ")
    assert total(found.phases()["generate"]) > 2 * least


def test_the_largest_micro_batch_is_the_last_that_fits() -> None:
    found = plan("qwen2.5-0.5B", "--colocate --plan-gpu rtx4090:1")
    most = largest(found.load, found.usable)
    assert peak(replace(found.load, tokens=most)) <= found.usable < peak(replace(found.load, tokens=most + 1))


@pytest.mark.parametrize("setting", ["--no-gradient-checkpointing", "--gradient-checkpointing"])
def test_on_a_cpu_each_setting_needs_what_a_plan_with_it_says(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holes of a trainer's heap belong to a setting and its tokens, and to each rank."""
    monkeypatch.setattr(planning, "host_bytes", lambda: 10**11)
    words = "--device cpu --actor-num-gpus-per-node 2 --max-tokens-per-gpu"
    lines = "\n".join(plan_lines(*run("qwen2.5-0.5B", f"{words} 4608"))).splitlines()
    row = next(line for line in lines if line.startswith(f"  {setting}"))
    needs, most = row.replace(" (as given)", "").split()[1:3]
    with_it = plan("qwen2.5-0.5B", f"{words} 4608 {setting}").phases()["train"]
    assert float(needs) == pytest.approx(total(with_it) / 1e9, abs=0.06)
    for more, fits in ((0, True), (1, False)):
        found = plan("qwen2.5-0.5B", f"{words} {int(most.replace(',', '')) + more} {setting}")
        assert (total(found.phases()["train"]) <= found.usable) is fits


def test_the_whole_run_is_planned_in_hours_on_its_own_gpus_and_on_disk() -> None:
    words = "--colocate --plan-gpu h100:8 --actor-num-nodes 3 --save out --save-interval 30"
    lines = plan_lines(*run("qwen2.5-7B", words))
    hours = next(line for line in lines if line.startswith("  a rollout: "))
    found = plan("qwen2.5-7B", words)
    whole = 1000 * found.rollout_seconds() / 3600
    assert hours == f"  a rollout: {found.rollout_seconds():.1f} s; all 1,000: {whole:,.1f} hours"
    assert found.rollout_seconds() == sum(found.seconds().values())
    apart = plan("qwen2.5-7B", "--plan-gpu h100:8 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --async-rollout")
    seconds = apart.seconds()
    assert (
        apart.rollout_seconds()
        == max(
            seconds["generate"] + seconds["between"],
            sum(seconds[name] for name in seconds if name not in ("generate", "between", "sync")),
        )
        + seconds["sync"]
    ), "training overlaps with the next generation"
    traffic = lines[next(i for i, line in enumerate(lines) if line.startswith("what ranks send")) :]
    assert any(line.split()[:1] == ["24"] for line in traffic), "the run's own number of GPUs has a row"
    each = f"{12 * found.load.trained / 1e9:.1f} GB"
    assert each == "91.4 GB"
    disk = next(line for line in lines if line.startswith("  disk: "))
    most = f"at most {34 * 12 * found.load.trained / 1e9:,.1f} GB for 34 of them at the same time"
    assert disk == f"  disk: {each} for each checkpoint of --save, {most}; --save-retain-interval keeps fewer"
    adapter = plan_lines(*run("qwen2.5-7B", f"{words} --save-retain-interval 500 --lora-rank 16 --no-save-optim"))
    disk = next(line for line in adapter if line.startswith("  disk: "))
    assert disk == "  disk: 0.2 GB for each checkpoint of --save, at most 0.5 GB for 3 of them at the same time"


def test_ranks_on_a_cpu_share_its_memory() -> None:
    one, two = (plan("qwen2.5-0.5B", f"--device cpu --actor-num-gpus-per-node {n}").phases()["train"] for n in (1, 2))
    assert two["weights"] == one["weights"]
    assert two["activations"] == 2 * one["activations"]


def test_phases_hold_what_is_there_at_the_same_time() -> None:
    """Trainer and engine take turns on their GPUs, unless neither gives its memory back."""
    turns = plan("qwen2.5-0.5B", "--colocate --plan-gpu h100:1").phases()
    both = plan("qwen2.5-0.5B", "--colocate --no-offload-train --no-offload-rollout --plan-gpu h100:1").phases()
    apart = plan("qwen2.5-0.5B", "--rollout-num-gpus 1 --plan-gpu h100:2").phases()
    state = 12 * 494_032_768
    assert both["generate"]["optimizer"] + both["train"]["KV pool"] > 0 == turns["generate"].get("optimizer", 0)
    assert turns["train"] == apart["train"] | {"others": CONTEXT}
    assert both["train"]["weights"] == turns["train"]["weights"] + both["generate"]["weights"] - state / 3


def test_sglang_takes_the_share_of_a_gpu_that_a_flag_or_it_itself_says() -> None:
    """2 to 3 GB of cache beside the 15.2 GB of a 7B model on a card of 24 GB, as SGLang reserves 6.7 GiB there."""
    card = "--colocate --lora-rank 16 --max-tokens-per-gpu 4608 --plan-gpu rtx4090:1"
    usual, less = (plan("qwen2.5-7B", f"{card} {words}") for words in ("", "--sglang-mem-fraction-static 0.65"))
    pool, smaller = (found.phases()["generate"]["KV pool"] for found in (usual, less))
    assert 2e9 < pool < 3e9
    assert pool - smaller == pytest.approx((0.72 - 0.65) * (usual.memory - CONTEXT))
    embedded = plan("qwen2.5-7B", f"{card} --rollout-backend embedded").phases()["generate"]
    assert embedded["KV pool"] > pool
    assert embedded["KV pool"] < EMBEDDED_CACHE * (usual.memory - embedded["weights"])
    assert EMBEDDED_CACHE == GPU_CACHE_SHARE
    assert "others" not in embedded


def test_checkpointing_is_derived_from_what_the_plan_counts() -> None:
    """At the largest micro-batch without it that the plan holds to fit, and one token more."""
    words = "--colocate --plan-gpu h100:1 --rollout-backend sglang --max-tokens-per-gpu"
    found = plan("qwen2.5-0.5B", f"{words} 9216 --no-gradient-checkpointing")
    most = largest(found.load, found.usable - found.beside_training())
    assert [run("qwen2.5-0.5B", f"{words} {most + more}")[0].gradient_checkpointing for more in (0, 1)] == [False, True]


def test_a_share_of_sglang_that_leaves_no_room_for_the_rest() -> None:
    """The trainer's context and NCCL's buffers stay on the GPU; what is said to fit fits."""
    words = "--colocate --lora-rank 16 --max-tokens-per-gpu 4608 --plan-gpu rtx4090:1 --sglang-mem-fraction-static"
    for share, asked in ((0.97, "needs 27.4 of the 25.2"), (0.5, "needs 15.5 of the 12.6")):
        said = verdict(plan("qwen2.5-7B", f"{words} {share}"))
        assert said.startswith(f"does not fit: generate {asked} GB")
        remedy = said.partition("; --sglang-mem-fraction-static ")[2].partition(" ")[0]
        assert verdict(plan("qwen2.5-7B", f"{words} {remedy}")).startswith("fits: ")
    apart = verdict(plan("qwen3-32B", "--plan-gpu h100:8 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 4"))
    assert "--sglang-mem-fraction-static" not in apart  # the trainer's memory is too small, for the sync too
    eight = plan("qwen2.5-7B", "--colocate --plan-gpu h100:8").phases()
    assert eight["generate"]["others"] == CONTEXT + NCCL
    assert eight["train"]["others"] == CONTEXT


@pytest.mark.sglang
def test_the_share_is_that_of_the_installed_sglang(sglang_environment: dict[str, str]) -> None:
    """Its own rule, asked with stand-ins for the GPU and for the parts that read a model."""
    program = Path(__file__).with_name("sglang_share.py")
    done = subprocess.run([sys.executable, program], env=sglang_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == 7 * 2 * 9
    for mib, tp, options, share in rows:
        found = Sglang.of(mib * 2**20, tp, options, releases=False).share(mib * 2**20, tp)
        assert found == share, (mib, tp, options)


def test_flags_of_graphs_and_chunks_change_what_sglang_reserves() -> None:
    words = "--rollout-backend sglang --plan-gpu rtx4090:1 --colocate"

    def reserved(more: str) -> float:
        found = plan("qwen2.5-0.5B", f"{words} {more}")
        return (found.memory - CONTEXT - found.serving.static) / 2**20

    usual = reserved("")
    for smaller in ("--sglang-cuda-graph-max-bs-decode 8", "--sglang-cuda-graph-max-bs 8"):
        assert usual - reserved(smaller) == pytest.approx(2 * (48 - 8), abs=25)
    # prompts that are computed whole: up to 16,384 tokens instead of chunks of 4,096
    assert reserved("--sglang-chunked-prefill-size -1") - usual == pytest.approx(1.5 * (16384 - 4096), rel=0.05)
    assert plan("qwen2.5-0.5B", f"{words} --sglang-chunked-prefill-size -1").serving.chunk == 16384
    assert reserved("--sglang-cuda-graph-backend-prefill disabled") == usual
    kept = "--no-offload-rollout --sglang-cuda-graph-backend-prefill"
    assert reserved(f"{kept} disabled") == usual
    assert reserved(f"{kept} breakable") - usual == pytest.approx(50 * 8, rel=0.05)


def test_a_server_that_releases_its_memory_keeps_less_for_graphs() -> None:
    """As it is started: it records no CUDA graphs of prompts, 50 of 8 MiB on a card of 24 GB."""
    words = "--rollout-backend sglang --plan-gpu rtx4090:2 --actor-num-gpus-per-node 1 --rollout-num-gpus 1"
    turns, apart = (plan("qwen2.5-0.5B", f"{words} {more}") for more in ("--colocate", "--no-offload-rollout"))
    assert turns.serving.static - apart.serving.static == pytest.approx(50 * 8 * 2**20, rel=0.05)
    fields = [server_fields(EngineFactory(each.args).setup(0)) for each in (turns, apart)]
    assert [each.get("cuda_graph_backend_prefill") for each in fields] == ["disabled", None]


def test_a_decode_step_costs_time_however_small_the_model() -> None:
    """Each layer waits for the one before, and each token for the host."""
    words = "--colocate --plan-gpu h100:1 --rollout-backend"
    for backend, layer in (("sglang", time.LAYER), ("embedded", time.EAGER_LAYER)):
        found = plan("qwen2.5-0.5B", f"{words} {backend} --rollout-batch-size 1 --n-samples-per-prompt 2")
        assert found.seconds()["generate"] > 4096 * (24 * layer + time.HOST)
    few, many = (plan("qwen2.5-0.5B", f"{words} sglang --sglang-server-concurrency {n}") for n in (16, 256))
    assert few.seconds()["generate"] > 2 * many.seconds()["generate"]


def test_responses_that_are_not_equally_long_wait_for_the_longest() -> None:
    equal = Work(8, 8, 100, 1000, 1, shares=False)
    assert time.decode_steps(equal, 64, 16) == 4 * 1000
    assert time.decode_steps(replace(equal, longest=4000), 64, 16) == 4000 + 3 * 1000
    assert time.decode_steps(replace(equal, longest=4000), 64, 64) == 4000
    found = plan("qwen2.5-7B", "--colocate --plan-gpu h100:8")
    words = "if the average length is a quarter of that: "
    (said,) = [
        line
        for line in plan_lines(*run("qwen2.5-7B", "--colocate --plan-gpu h100:8"))
        if line.strip().startswith(words)
    ]
    shorter = float(said.split("generate ")[1].split(",")[0])
    assert found.seconds()["generate"] / 4 < shorter < found.seconds()["generate"]


def test_several_steps_need_the_log_probs_of_those_that_are_trained_later() -> None:
    once, four, spared = (
        plan("qwen2.5-7B", f"--colocate --plan-gpu h100:8 {words}").costs()
        for words in ("", "--num-steps-per-rollout 4", "--num-steps-per-rollout 4 --use-rollout-logprobs")
    )
    assert "old log-probs" not in once | spared
    assert four["old log-probs"].operations == pytest.approx(3 / 4 * once["train"].operations / 4, rel=0.01)


def test_compile_is_proposed_where_it_gains() -> None:
    def line(model: str, words: str) -> list[str]:
        lines = "\n".join(plan_lines(*run(model, f"--colocate {words}"))).splitlines()
        return [line for line in lines if "with --compile, training would take" in line]

    (small,) = line("qwen2.5-0.5B", "--plan-gpu h100:1")
    found = plan("qwen2.5-0.5B", "--colocate --plan-gpu h100:1 --compile")
    assert f" {found.costs()['train'].mfu(gpus()['h100']):.0%} MFU" in small
    assert "the first step takes" in small
    assert not line("qwen2.5-0.5B", "--plan-gpu h100:1 --compile")
    assert not line("qwen3-32B", "--plan-gpu h100:8 --actor-num-nodes 4")
    assert not line("qwen2.5-0.5B", "--device cpu")


def test_what_is_offloaded_is_counted_on_the_host() -> None:
    def host(words: str) -> list[str]:
        lines = "\n".join(plan_lines(*run("qwen2.5-7B", f"--plan-gpu h100:8 {words}"))).splitlines()
        return [line for line in lines if "host memory for each rank:" in line]

    assert "11.4 GB" in host("--colocate")[0]
    assert host("--colocate --fsdp-cpu-offload") == host("--colocate")
    assert not host("--actor-num-gpus-per-node 4 --rollout-num-gpus 4")


def test_a_rank_reads_its_part_of_a_model() -> None:
    """Llama-3.1-70B on eight ranks that keep their parts in host memory; one rank reads it all."""
    sizes = {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    shapes = Shapes.of({"model_type": "llama", **sizes, "num_key_value_heads": 8, "vocab_size": 128256})
    assert shapes is not None
    part = 4 * shapes.parameters / 8
    assert 35e9 < part < Load(shapes, tokens=1, shards=8, on_host=True).reading() < 1.3 * part
    assert Load(shapes, tokens=1, shards=8).reading() < 0.3e9
    assert Load(shapes, tokens=1, shards=8, four_bit=True).reading() < 1e9
    lines = "\n".join(plan_lines(*run("qwen2.5-7B", "--plan-gpu h100:8 --colocate"))).splitlines()
    assert "  host memory for each rank while it reads the model: 0.1 GB at most" in lines


def test_weights_of_an_engine_that_wait_in_host_memory_are_counted() -> None:
    """Those that no weight sync sends: 7.6 billion parameters in bf16."""

    def host(words: str) -> list[str]:
        lines = "\n".join(plan_lines(*run("qwen2.5-7B", f"--plan-gpu h100:8 {words}"))).splitlines()
        return [line for line in lines if "host memory for each engine" in line]

    assert "15.2 GB of weights" in host("--colocate --lora-rank 16")[0]
    for none in ("", "--lora-rank 16 --lora-sync merged", "--lora-rank 16 --no-offload-rollout"):
        assert host(f"--colocate {none}") == []
    assert host("--lora-rank 16 --actor-num-gpus-per-node 4 --rollout-num-gpus 4") == []


def test_a_critic_is_another_learner_with_adapters_of_its_own() -> None:
    """In bytes of a parameter: weights and moments, a gradient, and frozen weights in bf16."""
    ppo, parameters = "--colocate --plan-gpu h100:1 --advantage-estimator ppo", 494_032_768
    flags = {(): 24, ("--lora-rank 16",): 14, ("--lora-rank 16", "--critic-lora-rank 16"): 4}
    loads = {words: plan("qwen2.5-0.5B", " ".join([ppo, *words])).load for words in flags}
    for words, load in loads.items():
        assert total(load.state()) / parameters == pytest.approx(flags[words], abs=0.5)
    full, one, both = (total(load.train()) for load in loads.values())
    assert full > one > both
    variants = "\n".join(plan_lines(*run("qwen2.5-0.5B", ppo)))
    assert "--lora-rank 16 --critic-lora-rank 16 --gradient-checkpointing" in variants
    found = [line.split()[0] for line in variants.splitlines() if line.startswith(("  values ", "  critic "))]
    assert found == ["values", "critic"]


def test_a_response_is_no_longer_than_the_context() -> None:
    for words, context in (("", 128), ("--rollout-max-context-len 100", 100)):
        shape = f"--max-position-embeddings 128 --rollout-max-prompt-len 20 {words}"
        lines = plan_lines(*run("qwen2.5-0.5B", f"--colocate --plan-gpu h100:8 {shape}"))
        rows = [line.split()[-1] for line in "\n".join(lines).splitlines() if "gradient-checkpointing" in line]
        assert rows
        assert set(rows) == {str(context - 20)}


def test_each_other_setting_has_a_line() -> None:
    for words in ("", "--fsdp-cpu-offload", "--lora-rank 16", "--no-gradient-checkpointing"):
        lines = "\n".join(plan_lines(*run("qwen2.5-7B", f"--colocate --plan-gpu h100:8 {words}"))).splitlines()
        begin = next(i for i, line in enumerate(lines) if line.startswith("  with  ")) + 1
        rows = [line.split(" (as given)") for line in lines[begin : lines.index(next(filter(is_time, lines)))]]
        assert sum(len(row) == 2 for row in rows) == 1, "one of them is the run's own"
        assert len({row[0] for row in rows}) == len(rows) == (3 if "lora" in words else 4)
        given = next(row for row in rows if len(row) == 2)
        others = [row[0] for row in rows if row is not given]
        assert any("--no-fsdp-cpu-offload" in row for row in others) == (words == "--fsdp-cpu-offload")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h10:8", "did you mean h100:8?"),
        ("h100:x", "x is not a number of GPUs"),
        ("h100:99999999999999", "write h100:8, and"),
    ],
)
def test_a_gpu_that_is_not_known(text: str, said: str) -> None:
    with pytest.raises(ArgumentError) as error:
        run("qwen2.5-7B", f"--colocate --plan-gpu {text}")
    assert said in str(error.value.problems)


def test_planned_gpus_are_those_that_flags_are_derived_from() -> None:
    args, _ = run("qwen2.5-7B", "--colocate --plan-gpu a100-80:4")
    assert (args.device, args.actor_num_gpus_per_node, args.gradient_checkpointing) == ("cuda", 4, True)


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_names_of_nvidia_smi(title: str, name: str) -> None:
    found = recognized(title)
    assert found is not None
    assert found.name == name
    assert recognized("Tesla K80") is None


def test_more_gpus_send_more_and_replicas_less() -> None:
    lines = "\n".join(plan_lines(*run("qwen2.5-7B", "--colocate --plan-gpu h100:8"))).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("what ranks send")) + 2
    rows = [line.split() for line in lines[begin : begin + 5]]
    assert [int(row[0]) for row in rows] == [1, 8, 64, 256, 1024]
    seconds = [float(row[2]) for row in rows]
    assert seconds == sorted(seconds)
    assert all(float(row[5]) < float(row[2]) for row in rows[2:])
    assert any("--dp-replicate-size NODES sends in less time" in line for line in lines)


def test_only_a_faster_placement_is_proposed() -> None:
    def proposed(words: str) -> list[str]:
        lines = "\n".join(plan_lines(*run("qwen2.5-7B", f"--plan-gpu h100:8 {words}"))).splitlines()
        return [line for line in lines if line.startswith("  faster with --colocate")]

    assert proposed("--colocate") == []
    assert proposed("--colocate --rollout-num-gpus-per-engine 2") == [], "narrower engines would be slower"
    (line,) = proposed("--colocate --rollout-num-gpus-per-engine 8")
    assert "8 engines of 1 GPU(s)" in line
    assert len(proposed("--actor-num-gpus-per-node 4 --rollout-num-gpus 4")) == 1, "they wait for each other"


def test_engines_wider_than_the_gpus_are_no_placement() -> None:
    words = "--rollout-num-gpus 1 --actor-num-gpus-per-node 1 --sglang-mem-fraction-static 0.3 --plan-gpu rtx4090:2"
    for model, given in (("qwen2.5-7B", words), ("qwen3-32B", "--colocate --plan-gpu rtx4090:2")):
        assert plan_lines(*run(model, given))


def test_an_engine_that_keeps_its_memory_is_what_the_remedy_names() -> None:
    words = "--colocate --plan-gpu h100:8 --rollout-backend sglang"
    kept = f"{words} --no-offload-rollout"
    said = verdict(plan("qwen2.5-7B", kept))
    assert said.count("without --no-offload-rollout it would fit") == 1
    assert "no flag" not in said
    assert "; and sync needs " in said
    one = verdict(plan("qwen2.5-7B", kept.replace(":8", ":1")))
    assert "without --no-offload-rollout, which leaves the engine in the GPU's memory, --lora-rank 16" in one
    lines = ["\n".join(plan_lines(*run("qwen2.5-7B", each))) for each in (words, kept)]
    assert ["release and resume" in each for each in lines] == [True, False]


def test_a_gpu_is_named_in_any_case_and_the_suggestion_keeps_the_number() -> None:
    assert planned("H100:8") == planned("h100:8")
    assert planned("h100:8x3")[1:] == (8, 3)
    assert planned("h100:8")[1:] == (8, None)
    with pytest.raises(ValueError, match="is not a number of nodes; write h100:8x2"):
        planned("h100:8x")
    with pytest.raises(ValueError, match=r"did you mean h100:8\?"):
        planned("h10:8")
    with pytest.raises(ValueError, match=r"did you mean h100\?"):
        planned("h10")
    with pytest.raises(ValueError, match=r"did you mean a100-80:4 or a100-40:4\?"):
        planned("A100:4")
