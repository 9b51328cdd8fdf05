"""Pretraining: documents packed into sequences."""

from __future__ import annotations

from dataclasses import dataclass

from slimelite.arguments.conditions import DOCUMENTS, TEXTS, TRAINING, OfJob, use_of
from slimelite.arguments.flags import flag


@dataclass(frozen=True)
class PretrainingArgs(OfJob):
    """Pretraining.

    With --loss-type pretrain_loss, a rollout has --rollout-batch-size sequences of packed documents. --prompt-data
    names the documents: parquet, jsonl, jsonl.gz or txt files, folders or patterns of such files, or hub datasets. See
    docs/from_bytes.md.
    """

    seq_length: int = flag(2048, "documents are packed into sequences of this length [tokens]", TEXTS, at_least=2)
    text_key: str = flag("text", "this column of parquet and jsonl files contains the documents", TEXTS)
    cross_document_attention: bool = flag(
        False, "a token also attends to the earlier documents in its sequence", DOCUMENTS & TRAINING
    )
    token_cache: str = flag(
        "~/.cache/slimelite/tokens",
        "tokenised documents are cached in this folder",
        TEXTS,
        metavar="DIR",
    )
    tokenizer_workers: int = flag(
        None, "this many processes tokenise files", TEXTS, at_least=1, auto="the cores of this machine"
    )
    train_tokens: float | None = flag(
        None, "the run trains on this many tokens. Every sequence counts as --seq-length tokens", DOCUMENTS, above=0
    )
    train_flops: float | None = flag(
        None,
        "the run trains for this many floating-point operations. Every sequence counts as --seq-length tokens",
        DOCUMENTS,
        above=0,
    )
    tokens_per_parameter: float | None = flag(
        None,
        "the run trains on this many tokens for each parameter of the layers' matrices and of the LM head",
        DOCUMENTS,
        above=0,
    )
    depth: int | None = flag(
        None,
        "a new model has this many layers. The width of the model, the number of tokens, the batch size and the "
        "optimizer's settings are derived from this number, unless flags set them. docs/from_bytes.md has the rules",
        DOCUMENTS,
        at_least=1,
    )
    eval_bpb: list[str] = flag(
        [],
        "an evaluation measures the bits per byte (eval/bpb) of the documents in these files, folders or hub datasets",
        TRAINING & use_of("--eval-interval"),
        metavar="PATH",
    )
