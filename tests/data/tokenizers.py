"""Tiny tokenizers made on the spot."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<|eot_id|>", "<|eom_id|>", "<start_of_turn>", "<end_of_turn>", "<|start|>", "<|end|>", "<|return|>", "[/INST]"),
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def begin_with(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> None:
    """Put ``tokens`` before every text, as Llama 3's post-processor does."""
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in tokens]
    before = processors.TemplateProcessing(single=" ".join([*tokens, "$A"]), special_tokens=ids)
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), before])


def byte_tokenizer(
    template: str | None = CHATML, merges: Sequence[tuple[str, str]] = (), trim_offsets: bool = False
) -> PreTrainedTokenizerFast:
    """A byte is a token, a special token is one, and so is each of ``merges`` (in the byte-level alphabet)."""
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIALS])
    settings = {"bos_token": "<s>", "eos_token": "</s>", "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **settings)
