"""Flags of prompts, responses, environments of agents, and rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slimelite.arguments.conditions import (
    DYNAMIC_BATCH,
    EMBEDDED,
    EVALUATION,
    INFERENCE,
    NEW_ROLLOUTS,
    POLICY,
    POLICY_SAMPLING,
    SAMPLING,
    SUPERVISED,
    SYNC,
    TRAINING,
    OfJob,
    rule_reads,
    use_of,
    when,
)
from slimelite.arguments.flags import ALWAYS, SEEDS, flag, plugin, resolved, with_sampling
from slimelite.arguments.model import ClusterArgs
from slimelite.engines.params import SamplingParams
from slimelite.engines.registry import ENGINES, EngineKind
from slimelite.environments.registry import ENVIRONMENTS, is_address
from slimelite.models.families import LOSS_MASKS
from slimelite.rewards.rules import GRADER_MEMORY_MB, RULES
from slimelite.sandbox.registry import SANDBOXES, SandboxSettings, is_container
from slimelite.serving.tools import REASONING_FORMATS, TOOL_FORMATS

OWN_GENERATE = when(
    "--custom-generate-function-path",
    lambda a: a.custom_generate_function_path or any(d.custom_generate_function_path for d in a.eval_datasets),
)
# runs that may need a loss mask of conversations; a plugin may call slime's mask generator
CONVERSATIONS = SUPERVISED | when(
    "a plugin that reads this flag", lambda a: a.custom_generate_function_path or a.rollout_function_path
)


@dataclass(frozen=True)
class DataArgs(OfJob):
    """Data."""

    prompt_data: list[str] = flag(
        [],
        "prompts come from these files (jsonl or parquet) or hub datasets. path@[a:b] selects a slice of the rows. A "
        "single YAML file defines a mixture: paths with weights",
        NEW_ROLLOUTS,
        metavar="PATH",
    )
    prompt_data_weights: list[float] = flag(
        [],
        "relative weights of the paths of --prompt-data, such as 3 1",
        NEW_ROLLOUTS,
        above=0,
        auto="by their sizes",
    )
    input_key: str = flag("input", "this column contains the prompt: text or messages", NEW_ROLLOUTS)
    label_key: str | None = flag(
        None, "this column contains the label. The reward compares the response with the label", NEW_ROLLOUTS
    )
    metadata_key: str = flag(
        "metadata",
        "this column contains a dict that rewards and plugins can read. A column that this flag names must exist; the "
        "default column may be absent",
        NEW_ROLLOUTS,
    )
    tool_key: str = flag(
        "tools",
        "this column contains the tools that the chat template shows. A column that this flag names must exist; the "
        "default column may be absent",
        NEW_ROLLOUTS,
    )
    apply_chat_template: bool = flag(False, "the tokenizer's chat template turns messages into a prompt", NEW_ROLLOUTS)
    apply_chat_template_kwargs: dict[str, Any] = flag(
        {}, 'the chat template gets these arguments, as JSON: {"enable_thinking": false}', NEW_ROLLOUTS
    )
    rollout_max_prompt_len: int | None = flag(
        None,
        "prompts with more than this many tokens are left out",
        ALWAYS,
        at_least=1,
        auto="--rollout-max-context-len minus 1",
    )
    curriculum_threshold: float | None = flag(
        None,
        "threshold of a curriculum. Each task begins with the prompts of its lowest level (the metadata of a prompt "
        "gives its level). A task moves to its next level when the mean reward of its groups in a rollout reaches the "
        "threshold",
        NEW_ROLLOUTS & when("a run without --data-source-path", lambda a: a.data_source_path is None),
        auto="no curriculum: prompts of all levels",
    )
    rollout_shuffle: bool = flag(
        False,
        "prompts are shuffled again in every epoch. Without this flag, runs with any seed train on the prompts in the "
        "order of the file",
        NEW_ROLLOUTS,
    )
    rollout_seed: int = flag(
        42,
        "seed of sampling, and of the order of prompts with --rollout-shuffle. If only --seed is given, "
        "--rollout-seed has the value of --seed",
        NEW_ROLLOUTS,
        at_least=0,
        at_most=SEEDS[-1],
    )
    rollout_global_dataset: bool = flag(
        True,
        "the run has no dataset; prompts come from the plugin of --data-source-path or --rollout-function-path",
        NEW_ROLLOUTS,
        negative="--disable-rollout-global-dataset",
    )
    data_source_path: str | None = plugin("is a data source class of your own", NEW_ROLLOUTS)
    skip_bad_rows: bool = flag(
        False,
        "malformed rows are skipped, counted and reported. Without this flag, a malformed row ends the run",
        NEW_ROLLOUTS,
    )
    loss_mask_type: str = flag(
        "auto",
        "SFT finds the assistant's tokens by this method. auto derives them from the chat template. Each other "
        "value is slime's method for one model's chat template, and auto also works for these templates",
        CONVERSATIONS,
        choices=LOSS_MASKS,
    )

    num_rollout: int = flag(
        None,
        "the run has this many rollouts. This flag overrides --num-epoch",
        ALWAYS,
        at_least=0,
        auto="--num-epoch times prompts / --rollout-batch-size",
    )
    num_epoch: int | None = flag(
        None,
        "the run makes this many passes over the prompts",
        when("a run without --num-rollout (which overrides this flag)", lambda a: a.num_rollout is None),
        at_least=1,
    )
    rollout_batch_size: int = flag(None, "a rollout has this many prompts (required)", ALWAYS, at_least=1)
    n_samples_per_prompt: int = flag(
        1,
        "each prompt gets this many responses",
        when("generated responses (a pair already has its two replies)", lambda a: a.job.loss != "paired"),
        at_least=1,
    )
    global_batch_size: int = flag(
        None,
        "an optimizer step trains on this many samples",
        TRAINING,
        at_least=1,
        auto="all samples of the rollout, or those samples / --num-steps-per-rollout",
    )
    num_steps_per_rollout: int = flag(
        None,
        "a rollout makes this many optimizer steps",
        TRAINING,
        at_least=1,
        auto="samples of a rollout / --global-batch-size, rounded up",
    )
    micro_batch_size: int = flag(
        1,
        "a forward pass computes this many samples",
        TRAINING
        & when("a run without --use-dynamic-batch-size", lambda a: a.job.documents or not a.use_dynamic_batch_size),
        at_least=1,
    )
    use_dynamic_batch_size: bool = flag(
        False, "each forward pass is filled with samples until it has --max-tokens-per-gpu tokens", TRAINING
    )
    max_tokens_per_gpu: int | None = flag(
        None, "a forward and backward pass has at most this many tokens", DYNAMIC_BATCH, required=True, at_least=1
    )
    share_prefixes: bool = flag(
        True,
        "a prefix that several samples of a forward pass share, such as a group's prompt, is computed only once if "
        "the model's layers allow it. --no-share-prefixes computes the same gradients more slowly, for comparison",
        TRAINING,
    )
    log_probs_max_tokens_per_gpu: int | None = flag(
        None,
        "a pass that only computes log-probs has at most this many tokens",
        TRAINING,
        at_least=1,
        auto="--max-tokens-per-gpu",
    )


@dataclass(frozen=True)
@with_sampling("rollout", SAMPLING)
class RolloutArgs(DataArgs, ClusterArgs):
    """Rollout."""

    rollout_backend: str = flag(
        "auto",
        "this inference engine generates the responses",
        INFERENCE,
        choices=("auto", ENGINES),
        auto="sglang on GPUs if it is installed, else embedded",
    )
    kv_cache_tokens: int | None = flag(
        None,
        "the KV cache of the embedded engine holds this many tokens of running and cached sequences. Its memory is "
        "allocated as needed",
        EMBEDDED,
        at_least=1,
        auto="as many as fit into 4 GiB on a CPU, or into 60 % of the free memory on a GPU",
    )
    rollout_temperature: float = flag(
        1.0,
        "responses are sampled at this temperature, and training divides the logits by it too",
        POLICY | EVALUATION,
        at_least=0,
    )
    allow_truncated_sampling: bool = flag(
        False,
        "training computes log-probs over the whole vocabulary, although top-p, top-k or min-p truncated the sampling. "
        "Without this flag, log-probs are renormalised over the tokens that top-p, top-k and min-p kept",
        when(
            "--rollout-top-p, --rollout-top-k or --rollout-min-p",
            lambda a: SamplingParams.of(a, "rollout").truncation(),
        ),
    )
    train_constrained: bool = flag(
        False,
        "the run also trains on tokens that were sampled under a grammar, such as the JSON schema of an agent's "
        "request. The log-probs of these tokens are computed over the tokens that the grammar allowed. Without this "
        "flag, tokens that were sampled under a grammar have loss mask 0",
        POLICY,
    )
    rollout_max_context_len: int | None = flag(
        None, "prompt and response together have at most this length [tokens]", ALWAYS, at_least=1
    )
    rollout_max_response_len: int = flag(
        None, "a response has at most this length [tokens] (required if responses are generated)", ALWAYS
    )

    over_sampling_batch_size: int = flag(
        None, "a rollout keeps this many prompts in flight", POLICY_SAMPLING, auto="--rollout-batch-size"
    )
    dynamic_sampling_filter_path: str | None = plugin(
        "decides whether to keep a group: fn(args, samples)", POLICY_SAMPLING
    )
    keep_dropped: int = flag(
        4,
        "the run folder keeps this many dropped groups of each rollout, with the reasons. A group is dropped if a "
        "filter removed it, it is too stale, or it failed",
        POLICY_SAMPLING,
        at_least=0,
    )
    partial_rollout: bool = flag(
        False, "unfinished responses are continued in the next rollout instead of being dropped", POLICY_SAMPLING
    )
    mask_offpolicy_in_partial_rollout: bool = flag(
        False,
        "the run trains only on tokens that the current weights sampled. The flag matters for resumed responses, and "
        "for finished responses that were kept for a later rollout",
        POLICY_SAMPLING
        & when(
            "--partial-rollout, or --over-sampling-batch-size above --rollout-batch-size",
            lambda a: a.partial_rollout or (a.over_sampling_batch_size or 0) > (a.rollout_batch_size or 0),
        ),
    )
    max_weight_staleness: int | None = flag(
        None,
        "a sample is dropped if one of its tokens comes from weights that are more than this many updates old",
        POLICY_SAMPLING,
        at_least=0,
    )

    async_rollout: bool = flag(
        False,
        "the next rollout is generated during the training on the current rollout. The next rollout therefore uses "
        "weights from before this training (slime's train_async.py)",
        TRAINING,
    )
    update_weights_interval: int = flag(
        1,
        "weights are sent to the engines after every N rollouts",
        SYNC & use_of("--async-rollout"),
        at_least=1,
    )

    rollout_function_path: str | None = plugin(
        "generates the whole rollout: fn(args, rollout_id, data_source, evaluation=False)", NEW_ROLLOUTS
    )
    custom_generate_function_path: str | None = plugin(
        "generates one response: async fn(args, sample, sampling_params)", SAMPLING
    )
    generate_timeout: float = flag(
        3600.0,
        "time limit of one call of the custom generate function [s]; after it the call fails and is repeated",
        SAMPLING & OWN_GENERATE,
        at_least=1,
    )
    tool_call_parser: str | None = flag(
        None,
        "an agent's model writes its tool calls in this format",
        SAMPLING & OWN_GENERATE,
        choices=TOOL_FORMATS,
        auto="the format in the chat template",
    )
    reasoning_parser: str | None = flag(
        None,
        "an agent's model writes its thinking in this format",
        SAMPLING & OWN_GENERATE,
        choices=REASONING_FORMATS,
        auto="the format in the chat template",
    )
    agent_sandbox: str | None = flag(
        None,
        lambda: (
            "this sandbox runs the programs of --agent-command, the servers of --environment mcp and the code that a "
            "model writes. The choices are "
            + "".join(f"{kind.name} ({kind.summary}), " for kind in SANDBOXES.values())
            + "or a class as path/to/file.py:Class"
        ),
        SAMPLING,
        metavar="NAME",
        auto="process for the code that a model writes, none for programs and servers",
    )
    rollout_sample_hook_path: list[str] = flag(
        [],
        "this plugin gets each sample before its reward is computed: fn(args, sample). The flag may be given several "
        "times",
        SAMPLING,
        metavar="PLUGIN",
        repeat=True,
    )
    rollout_sample_filter_path: str | None = plugin(
        "sets remove_sample on the samples that training must leave out: fn(args, groups)", POLICY_SAMPLING
    )
    rollout_all_samples_process_path: str | None = plugin(
        "gets every finished group, including dropped groups: fn(args, groups, data_source)", POLICY_SAMPLING
    )
    buffer_filter_path: str | None = plugin(
        "picks groups from the buffer of groups that were returned to the data source: fn(args, rollout_id, buffer, n)",
        POLICY_SAMPLING,
        auto="first in, first out",
    )
    custom_rollout_log_function_path: str | None = plugin(
        "logs a rollout: fn(rollout_id, args, samples, metrics, seconds). If the function returns true, the default "
        "log is skipped",
        ALWAYS,
    )

    @property
    def engine_kind(self) -> EngineKind:
        """The record of ``--rollout-backend``."""
        return ENGINES[self.rollout_backend]

    @property
    def keeps_ids(self) -> bool:
        """Whether engines return the ids that top-p, top-k and min-p kept, for responses that are trained on."""
        return self.job.sampled and not self.allow_truncated_sampling


@dataclass(frozen=True)
class RewardArgs(RolloutArgs):
    """Reward."""

    rm_type: str | None = flag(
        None,
        lambda: f"this rule computes the reward: {', '.join(RULES)}. A boxed_ rule considers only \\boxed{{}}",
        SAMPLING & when("a run without --custom-rm-path (which overrides this flag)", lambda a: not a.custom_rm_path),
    )
    reward_key: str | None = flag(None, "if a reward is a dict, its entry with this key is the reward", SAMPLING)
    group_rm: bool = flag(
        False,
        "one call of --custom-rm-path scores a whole group",
        SAMPLING & when("--custom-rm-path", lambda a: a.custom_rm_path or a.rollout_function_path).strictly(),
    )
    rm_url: str | None = flag(
        None,
        "address of a server: the server of the reward rule remote_rm, or the teacher of --opd-type sglang",
        SAMPLING
        & (
            rule_reads("rm_url")
            | when("--use-opd --opd-type sglang", lambda a: a.use_opd and a.opd_type == "sglang")
            | when("a plugin that reads this flag", lambda a: a.custom_rm_path or a.custom_generate_function_path)
        ),
        metavar="URL",
    )
    custom_rm_path: str | None = plugin("computes the reward: async fn(args, sample)", SAMPLING)
    custom_reward_post_process_path: str | None = plugin(
        "replaces the group normalization: fn(args, samples) -> (raw rewards, rewards)", POLICY
    )
    reward_error: Literal["zero", "drop", "fail"] = flag(
        "zero",
        "what happens if a reward function raises an error, times out or returns a value that is not finite. zero: the "
        "reward is 0. drop: the sample is dropped. fail: the run ends",
        SAMPLING,
    )
    reward_timeout: float = flag(30.0, "a reward that takes longer than this counts as an error [s]", SAMPLING, above=0)
    code_timeout: float = flag(
        10.0, "all tests of a response must pass within this time [s]", SAMPLING & rule_reads("code_timeout"), above=0
    )
    code_memory_mb: int = flag(
        1024,
        "address-space limit of the tested program [MiB]. This limit must be below the memory limit of the grading "
        "process",
        SAMPLING & rule_reads("code_memory_mb"),
        at_least=64,
        below=GRADER_MEMORY_MB,
    )
    reward_model_path: str | None = flag(
        None,
        "the reward model is this Hugging Face model for sequence classification, with one output",
        SAMPLING & rule_reads("reward_model_path"),
    )
    reward_model_device: Literal["auto", "cpu", "cuda"] = flag(
        "auto",
        "the reward model runs on this device. With auto, the reward model runs on a GPU if its process sees one",
        SAMPLING & use_of("--reward-model-path"),
    )
    reward_model_batch_size: int = flag(
        8,
        "the reward model scores this many conversations at once",
        SAMPLING & use_of("--reward-model-path"),
        at_least=1,
    )
    format_regex: str | None = flag(
        None,
        "the rule `format` accepts a response if all of it matches this regular expression. The default is "
        "<think>...</think><answer>...</answer>",
        SAMPLING & (rule_reads("format_regex") | use_of("--format-reward-coef")),
    )
    format_reward_coef: float = flag(
        0.0,
        "in training, this value is added to the reward of a response that the rule `format` accepts",
        POLICY_SAMPLING,
    )
    overlong_buffer_len: int | None = flag(
        None,
        "length of the overlong buffer [tokens], which ends at --rollout-max-response-len. In training, a response "
        "that ends in the buffer is penalized",
        POLICY_SAMPLING,
        at_least=1,
    )
    overlong_penalty_factor: float = flag(
        1.0,
        "the penalty of --overlong-buffer-len grows from 0 at the start of the buffer to this value at its end",
        POLICY_SAMPLING & use_of("--overlong-buffer-len"),
        at_least=0,
    )

    # whether a sample without a label gets the reward 0; otherwise a missing label is an error
    unlabelled_is_zero: bool = resolved(False)


# the generate functions of runs with --environment and with --agent-command
EPISODE, PROGRAM = "slimelite.rollout.episodes.play", "slimelite.rollout.episodes.run"
PROGRAMS = SAMPLING & NEW_ROLLOUTS & use_of("--agent-command")
EPISODES = SAMPLING & NEW_ROLLOUTS & use_of("--environment")
BOXED = SAMPLING & when("an --agent-sandbox other than none", lambda a: (a.agent_sandbox or "none") != "none")
CONTAINED = SAMPLING & when("an --agent-sandbox that uses containers", lambda a: is_container(a.agent_sandbox))
IN_THIS_RUN = EPISODES & when(
    "an environment that is not on a server",
    lambda a: a.environment is None or not is_address(a.environment),
)


@dataclass(frozen=True)
class EnvironmentArgs(RolloutArgs):
    """Environments.

    In an episode, the model and an environment take turns: a reply, a step, a reply, and so on. See docs/agents.md.
    """

    environment: str | None = flag(
        None,
        lambda: (
            "the model acts in this environment: "
            + "".join(f"{kind.name} ({kind.summary}), " for kind in ENVIRONMENTS.values())
            + "a class as path/to/file.py:Class, or a server as http://host:port"
        ),
        SAMPLING & NEW_ROLLOUTS,
        metavar="NAME[:SPEC]",
    )
    environment_max_turns: int = flag(16, "an episode has at most this many replies", EPISODES, at_least=1)
    environment_max_tokens: int | None = flag(
        None,
        "all replies of an episode together have at most this many tokens. --rollout-max-response-len limits each "
        "single reply",
        EPISODES,
        at_least=1,
        auto="what --rollout-max-context-len leaves",
    )
    environment_timeout: float = flag(
        600.0, "the calls of the environment in one episode together take at most this long [s]", EPISODES, above=0
    )
    environment_call_timeout: float = flag(
        60.0, "one call of the environment, such as a tool call, takes at most this long [s]", EPISODES, above=0
    )
    environment_processes: int = flag(
        0,
        "environments run in this many separate processes. With 0, environments run in the process of the rollout",
        IN_THIS_RUN,
        at_least=0,
    )
    agent_command: str | None = flag(
        None,
        "this program answers each prompt. The program gets the row as JSON on stdin, calls the model at "
        'OPENAI_BASE_URL, and prints {"reward": 1.0} as its last line. If the program prints no reward, --rm-type '
        "computes the reward",
        SAMPLING & NEW_ROLLOUTS,
        metavar="COMMAND",
    )
    agent_timeout: float = flag(600.0, "a program that runs longer than this counts as failed [s]", PROGRAMS, above=0)
    agent_programs: int = flag(256, "at most this many programs run at the same time", PROGRAMS, at_least=1)
    agent_network: Literal["none", "loopback", "full"] = flag(
        "loopback",
        "a program in a sandbox may connect to nothing (none), only to the model (loopback), or to everything (full)",
        BOXED,
    )
    agent_sandbox_read: list[str] = flag(
        [],
        "a program in a sandbox may also read these files and folders. The program may always read the system's files, "
        "and the files that its command names",
        BOXED,
        metavar="PATH",
    )
    agent_image: str | None = flag(
        None,
        "the containers of --agent-sandbox podman or docker use this image. The image must be on this machine and "
        "contain a shell",
        CONTAINED,
        metavar="IMAGE",
    )
    agent_memory_mb: int = flag(
        4096, "memory limit of a program in a sandbox, including all processes that it starts [MiB]", BOXED, at_least=64
    )
    agent_processes: int = flag(
        256, "a program in a sandbox has at most this many processes and threads", BOXED, at_least=8
    )
    agent_disk_mb: int = flag(
        1024, "all files of a program in a sandbox together have at most this size [MiB]", BOXED, at_least=1
    )

    @property
    def sandbox(self) -> SandboxSettings:
        """The flags of ``--agent-sandbox``."""
        return SandboxSettings(
            self.agent_sandbox,
            self.agent_network,
            tuple(self.agent_sandbox_read),
            self.agent_memory_mb,
            self.agent_processes,
            self.agent_disk_mb,
            self.agent_image,
        )
