"""A tiny model that speaks bytes, and chat templates in the manner of well-known families, written for these tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from slimelite.engines.checks import holds_stop
from slimelite.engines.embedded.engine import EmbeddedEngine
from slimelite.engines.protocol import GenerateRequest, GenerateResult, OnTokens
from slimelite.engines.sampling import Sampler
from slimelite.serving.format import ChatFormat
from slimelite.serving.sessions import Sessions
from tests.support import templates

# the tokens that these models were trained with as one token, by whether they are special
MARKS = {
    **dict.fromkeys(["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"], True),
    **dict.fromkeys(["[INST]", "[/INST]", "[TOOL_CALLS]", "<|user|>", "<|assistant|>", "<|observation|>"], True),
    **dict.fromkeys(["<think>", "</think>", "<tool_call>", "</tool_call>"], False),
    **dict.fromkeys(["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"], True),
    **dict.fromkeys(["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"], False),
    **dict.fromkeys(["<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"], False),
}
CASES = json.loads((Path(__file__).parents[1] / "data" / "chat_cases.json").read_text())["templates"]
LLAMA3 = """{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\n\nCalls look like {"name": function name, "parameters": its arguments}.\n' }}
    {{- (tools | tojson) + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call a turn') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {%- set role = 'ipython' if message.role == 'tool' else message.role %}
        {{- '<|im_start|>' + role + '\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}"""
MISTRAL = """{{- bos_token }}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if message == asked[-1] and tools %}{{- '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS]' + (message.tool_calls | map(attribute='function') | list | tojson) + eos_token }}
    {%- elif message.role == 'assistant' %}{{- message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if not messages[loop.index0 - 1].tool_calls %}{{- raise_exception('an answer needs a call') }}{%- endif %}
        {{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
GLM = """{%- if tools %}{{- '<|user|>tools ' + (tools | tojson) }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key><arg_value>' }}
                {{- (value if value is string else value | tojson) + '</arg_value>' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- else %}
        {{- ('<|observation|>' if message.role == 'tool' else '<|user|>') + '\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"""
DEEPSEEK = """{{- bos_token }}{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<｜Assistant｜>' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if loop.first %}{{- '<｜tool▁calls▁begin｜>' }}{%- endif %}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
            {{- (call.function.arguments | tojson) + '<｜tool▁call▁end｜>' }}
            {%- if loop.last %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- else %}{{- '<｜User｜>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}"""
# family -> template
TEMPLATES = {
    "qwen2.5": CASES["qwen2_5"],
    "qwen3": CASES["qwen3"],
    "qwen3.5": CASES["qwen3_5_think"],
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "glm": GLM,
    "deepseek": DEEPSEEK,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "top": {"type": "integer"}}},
    },
}


def tokenizer(family: str = "qwen2.5") -> PreTrainedTokenizerFast:
    """A byte is a token, and so is each of `MARKS` and of three merges, so that texts have several spellings.

    ``family``: a name in `TEMPLATES`, or that of a real template in `tests.support.templates`.
    """
    if family not in TEMPLATES:
        return templates.tokenizer(family)
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "a")]
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    words = Tokenizer(models.BPE(vocabulary, merges))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_tokens([AddedToken(text, normalized=False, special=special) for text, special in MARKS.items()])
    ends = {"mistral": "</s>", "deepseek": "<｜end▁of▁sentence｜>", "llama3": "<|eot_id|>", "glm": "<|user|>"}
    settings = {"bos_token": "<s>", "eos_token": ends.get(family, "<|im_end|>"), "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATES[family], **settings)


def build(folder: Path, family: str = "qwen2.5", seed: int = 0, **changes: Any) -> Path:
    """Save a random Qwen2 model with this tokenizer to ``folder``."""
    spoken = tokenizer(family)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 8192, "vocab_size": len(spoken)}
    config = AutoConfig.for_model("qwen2", **{**sizes, "eos_token_id": spoken.eos_token_id, **changes})
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.25)
    model.save_pretrained(folder)
    spoken.save_pretrained(folder)
    return folder


def engine_sampler(engine: EmbeddedEngine) -> Sampler:
    """One engine as the sampler of sessions."""

    async def sample(request: GenerateRequest, on_tokens: OnTokens | None) -> GenerateResult:
        if on_tokens is not None:
            return await engine.stream(request, on_tokens)
        (result,) = await engine.generate([request])
        return result

    return sample


class Scripted:
    """A sampler that says what it is told, in tokens; each text is spelled a byte a token, unlike its encoding."""

    def __init__(self, chat_format: ChatFormat, *replies: str) -> None:
        self.format, self.replies = chat_format, list(replies)
        self.requests: list[GenerateRequest] = []

    async def __call__(self, request: GenerateRequest, _: OnTokens | None) -> GenerateResult:
        self.requests.append(request)
        ids, stops = spell(self.format, self.replies.pop(0)), request.params.stop
        ends = (n for n in range(1, len(ids) + 1) if stops and holds_stop(self.format.decode, ids[:n], stops))
        end = next(ends, None)
        ids = ids[:end]
        reason = "stop" if end or ids[-1] in self.format.end_ids else "length"
        return GenerateResult(request.request_id, ids, [-0.5] * len(ids), [3] * len(ids), reason)


def spell(chat_format: ChatFormat, text: str) -> list[int]:
    """Tokens of ``text``: its marks, and a byte a token elsewhere; never the merges that an encoder would take."""
    whole = chat_format.encode(text)
    words = chat_format.tokenizer.backend_tokenizer
    merged = {words.token_to_id(t): [words.token_to_id(c) for c in t] for t in ("ab", "abc", "Ġa")}
    return [part for token in whole for part in merged.get(token, [token])]


def scripted(family: str, *replies: str) -> tuple[Sessions, Scripted]:
    """Sessions of a model of this family that will say ``replies``."""
    chat_format = ChatFormat(tokenizer(family))
    sampler = Scripted(chat_format, *replies)
    return Sessions(chat_format, sampler, 8192), sampler
