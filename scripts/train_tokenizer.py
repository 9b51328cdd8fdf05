"""Train a tokenizer: byte-level BPE with GPT-4's splitting, special tokens, and a chat template.

    python scripts/train_tokenizer.py --data "shards/*.parquet" --vocab-size 32768 --out data/tokenizer
    python scripts/train_tokenizer.py --data web=web.parquet code=code.jsonl notes=notes/ --out data/tokenizer \\
        --beside Qwen/Qwen2.5-0.5B

Texts come from parquet, jsonl, CSV or text files, folders, patterns, or a hub dataset (owner/name[:config][:split]).
All but CSV files may be larger than memory. `AutoTokenizer` and --tokenizer of train.py open the folder with the same
ids. There is one exception: next to the config.json of a Qwen2, transformers 5.12 splits texts as Qwen2 does, so use a
Qwen3 or a Llama. bytes_per_token.md in the folder compares each domain's bytes per token, on texts that training did
not see.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from slimelite.base.version import add_version
from slimelite.data.texts import read_texts
from slimelite.data.tokenizer import load_tokenizer

# begins every text and conversation; begins a turn; ends a turn, a reply and a document; fills a batch
BEGIN, TURN, END, PAD = "<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
# GPT-4's (tiktoken's cl100k_base); {digits} is 3 there
SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}{{1,{digits}}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
# ChatML; the marks around a reply say what SFT trains on
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# of each domain, one text of so many is kept from training, up to so many characters, to count its tokens
HELD_OUT_EVERY, HELD_OUT_CHARS = 20, 1_000_000


class Texts:
    """The texts of several domains, in turn. One of ``HELD_OUT_EVERY`` is not trained on, and goes to ``held_out``."""

    def __init__(self, domains: dict[str, str], column: str, max_chars: int, *, skip_bad: bool) -> None:
        """``domains``: name -> what `read_texts` reads. ``max_chars``: how many characters are trained on, in all."""
        self.held_out: dict[str, list[str]] = {name: [] for name in domains}
        self.chars = dict.fromkeys(domains, 0)
        self._streams = {
            name: read_texts(spec, column, skip_bad=skip_bad, flag="--column") for name, spec in domains.items()
        }
        self._max_chars = max_chars

    def __iter__(self) -> Iterator[str]:
        """The training texts: the same number of characters of each domain, while it has some."""
        streams, number, kept = dict(self._streams), dict.fromkeys(self._streams, 0), dict.fromkeys(self._streams, 0)
        while streams and sum(self.chars.values()) < self._max_chars:
            name = min(streams, key=lambda each: self.chars[each])
            text = next(streams[name], None)
            if text is None:
                del streams[name]
                continue
            number[name] += 1
            if number[name] % HELD_OUT_EVERY == 1 and kept[name] < HELD_OUT_CHARS:
                kept[name] += len(text)
                self.held_out[name].append(text[:HELD_OUT_CHARS])
                continue
            self.chars[name] += len(text)
            yield text


def train(texts: Iterator[str] | Texts, vocab_size: int, digits: int, specials: Sequence[str]) -> Tokenizer:
    """Byte-level BPE with ``vocab_size`` ids. The first ids are those of ``specials``, which no plain text is encoded
    to."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT.format(digits=digits)), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    begin = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return tokenizer


def save(tokenizer: Tokenizer, out: Path) -> None:
    """Write the folder, and check that it opens with the same ids.

    Raises:
        ValueError: `AutoTokenizer` or `load_tokenizer` gives other ids.
    """
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)
    file = out / "tokenizer_config.json"
    # named so, transformers takes tokenizer.json as it is, whatever model it lies beside
    content = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(content, indent=2) + "\n")
    probe = "Don't split 1234 or 'S\n\n\t x² — 你好 😀 <|im_end|>"
    expected = tokenizer.encode(probe).ids
    for opened in (load_tokenizer(str(out)), AutoTokenizer.from_pretrained(out)):
        if opened(probe)["input_ids"] != expected:
            raise ValueError(f"{out} opens as a {type(opened).__name__} with other ids than it was trained with")


def table(texts: dict[str, list[str]], folders: Sequence[str]) -> str:
    """Bytes per token of each domain with each tokenizer, as Markdown. ``folders``: tokenizers, ours first.

    Raises:
        ValueError: there is no tokenizer in a folder.
    """
    tokenizers = [load_tokenizer(folder) for folder in folders]
    names = ["this one", *folders[1:]]
    titles = [f"{name} ({len(tokenizer):,} ids)" for name, tokenizer in zip(names, tokenizers, strict=True)]
    lines = [f"| domain | bytes | {' | '.join(titles)} |", f"|---|---:|{'---:|' * len(titles)}"]
    for domain, those in texts.items():
        size = sum(len(text.encode()) for text in those)
        counts = [sum(map(len, t(those, add_special_tokens=False)["input_ids"])) for t in tokenizers] if those else []
        lines.append(f"| {domain} | {size:,} | {' | '.join(f'{size / count:.2f}' for count in counts) or '—'} |")
    return "\n".join(lines)


def domains_of(words: Sequence[str]) -> dict[str, str]:
    """Parse ``name=texts`` or texts into a dict by name.

    Raises:
        ValueError: two entries have the same name.
    """
    found: dict[str, str] = {}
    for word in words:
        name, sign, spec = word.partition("=")
        name, spec = (name, spec) if sign else (Path(word).stem or word, word)
        if name in found:
            raise ValueError(f"--data: two domains are called {name!r}: write name={spec} with another name")
        found[name] = spec
    return found


def main() -> None:
    """The program of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    add = parser.add_argument
    add("--data", nargs="+", required=True, metavar="[NAME=]TEXTS", help="texts, each with the name of its domain")
    add("--column", default="text", help="the column with the text (%(default)s)")
    add("--out", type=Path, required=True, help="folder to write")
    add("--vocab-size", type=int, default=32_768, help="number of ids, including special tokens (%(default)s)")
    add("--digits", type=int, default=3, choices=(1, 2, 3), help="most digits in a token (%(default)s, like GPT-4)")
    add(
        "--special",
        nargs="*",
        default=[],
        metavar="TOKEN",
        help="special tokens in addition to those of the chat template",
    )
    add("--max-chars", type=int, default=2_000_000_000, help="read at most this many characters (%(default)s)")
    add("--beside", nargs="*", default=[], metavar="FOLDER", help="tokenizers to compare with: folders or hub ids")
    add(
        "--skip-bad-rows",
        action="store_true",
        help="leave out and count texts that are empty, have NULs or are not UTF-8",
    )
    args = parser.parse_args()
    specials = list(dict.fromkeys((BEGIN, TURN, END, PAD, *args.special)))
    try:
        if args.vocab_size < 256 + len(specials):
            raise ValueError(f"--vocab-size {args.vocab_size}: 256 bytes and {len(specials)} special tokens need more")
        texts = Texts(domains_of(args.data), args.column, args.max_chars, skip_bad=args.skip_bad_rows)
        tokenizer = train(texts, args.vocab_size, args.digits, specials)
        if not sum(texts.chars.values()):
            raise ValueError(f"{' '.join(args.data)}: too few texts: one of {HELD_OUT_EVERY} is held out")
        args.out.mkdir(parents=True, exist_ok=True)
        save(tokenizer, args.out)
        page = table(texts.held_out, [str(args.out), *args.beside])
    except ValueError as error:
        parser.error(str(error))
    (args.out / "bytes_per_token.md").write_text(f"Bytes per token, on texts that training did not see:\n\n{page}\n")
    if (ids := tokenizer.get_vocab_size()) < args.vocab_size:
        print(f"only {ids} of {args.vocab_size} ids: the texts have no more pairs to merge", file=sys.stderr)
    print(f"{page}\n\n{args.out}: {ids} ids, from {sum(texts.chars.values()):,} characters")


if __name__ == "__main__":
    main()
