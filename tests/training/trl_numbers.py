"""Makes trl_numbers.json, what TRL computes for KTO, ORPO and a reward model on a few rows, in TRL's environment:

bash scripts/benchmarks/setup_rivals.sh trl
PYTHONPATH=tests:. build/rivals/trl/bin/python tests/training/trl_numbers.py      # TRL 1.16.0, 2026-11-23
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

FILE = Path(__file__).parent / "trl_numbers.json"
CONFIG = {
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "pad_token_id": 319,
}
KTO = {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7}
ORPO_LAMBDA = 0.4


def fill(model: nn.Module, phase: float) -> None:
    """Weights by a formula, which no version of a generator of random numbers changes."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            ramp = torch.arange(parameter.numel(), dtype=torch.float64)
            values = 0.3 * torch.sin(ramp * (1.7 + 0.1 * number) + phase + number)
            parameter.copy_((values + (parameter.ndim == 1)).reshape(parameter.shape))


def folders(root: Path) -> dict[str, Path]:
    """Policy, reference and reward model."""
    config = AutoConfig.for_model("qwen2", **CONFIG, num_labels=1)
    kinds = {
        "policy": AutoModelForCausalLM,
        "reference": AutoModelForCausalLM,
        "scorer": AutoModelForSequenceClassification,
    }
    for number, (name, kind) in enumerate(kinds.items()):
        model = kind.from_config(config)
        fill(model, phase=-number * 0.05)
        model.save_pretrained(root / name)
    return {name: root / name for name in kinds}


def digest(gradients: dict[str, Tensor]) -> dict[str, list[float]]:
    """Of each weight's gradient, its norm and its product with a fixed vector."""
    found = {}
    for name, gradient in gradients.items():
        flat = gradient.double().flatten()
        fixed = torch.cos(torch.arange(len(flat), dtype=torch.float64))
        found[name] = [flat.norm().item(), (flat @ fixed).item()]
    return found


def rows_of(ids: Tensor, attended: Tensor, trained: Tensor) -> list[dict[str, list[int]]]:
    """Each row's prompt and response, without padding."""
    rows = []
    for row, seen, mask in zip(ids.tolist(), attended.bool().tolist(), trained.bool().tolist(), strict=True):
        tokens = [(token, own) for token, there, own in zip(row, seen, mask, strict=True) if there]
        rows.append({"prompt": [t for t, own in tokens if not own], "response": [t for t, own in tokens if own]})
    return rows


def main() -> None:
    """Write the file."""
    from data.tokenizers import byte_tokenizer
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    with tempfile.TemporaryDirectory() as root:
        models = folders(Path(root))
        tokenizer = byte_tokenizer(template=None)
        tokenizer.bos_token = None
        tokenizer.add_tokens([f"<{i}>" for i in range(CONFIG["vocab_size"] - len(tokenizer) - 1)])
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
        assert tokenizer.pad_token_id == CONFIG["pad_token_id"]
        common = {
            "output_dir": root,
            "per_device_train_batch_size": 4,
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
        }

        def load(name: str, kind: Any = AutoModelForCausalLM) -> Any:
            return kind.from_pretrained(models[name], attn_implementation="eager")

        def numbers(trainer: Any, batch: Any, rows: Any) -> dict[str, Any]:
            trainer.model.eval()
            loss = trainer.compute_loss(trainer.model, batch)
            loss.backward()
            gradients = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
            return {"rows": rows, "loss": loss.item(), "gradients": digest(gradients)}

        prompts = ["one and two", "b", "how?", "longer: 1+2="]
        replies = ["three", "ccccc", "so", "three, I say"]
        labels = [True, False, False, True]
        data = [{"prompt": p, "completion": c, "label": d} for p, c, d in zip(prompts, replies, labels, strict=True)]
        kto = KTOTrainer(
            load("policy"),
            ref_model=load("reference"),
            args=KTOConfig(**common, **KTO),
            train_dataset=Dataset.from_list(data),
            processing_class=tokenizer,
        )
        batch = kto.data_collator([kto.train_dataset[i] for i in range(4)])
        rows = rows_of(batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
        result = {"kto": numbers(kto, batch, rows) | {"labels": labels, "kl": kto._metrics["eval"]["kl"][0]}}

        pairs = [
            {"prompt": p, "chosen": c, "rejected": r}
            for p, c, r in zip("abcd", replies, ["no", "none of it", "zz", "four"], strict=True)
        ]
        orpo = ORPOTrainer(
            load("policy"),
            args=ORPOConfig(**common, beta=ORPO_LAMBDA),
            train_dataset=Dataset.from_list(pairs),
            processing_class=tokenizer,
        )
        batch = orpo.data_collator([orpo.train_dataset[i] for i in range(4)])
        sides = [
            rows_of(batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"], batch[f"{side}_labels"] != -100)
            for side in ("chosen", "rejected")
        ]
        result["orpo"] = numbers(orpo, batch, sides)

        talks = [{"chosen": p["prompt"] + p["chosen"], "rejected": p["prompt"] + p["rejected"]} for p in pairs]
        reward = RewardTrainer(
            load("scorer", AutoModelForSequenceClassification),
            args=RewardConfig(**common, disable_dropout=True),
            train_dataset=Dataset.from_list(talks),
            processing_class=tokenizer,
        )
        batch = reward.data_collator([reward.train_dataset[i] for i in range(4)])
        whole = rows_of(batch["input_ids"], batch["attention_mask"], torch.zeros_like(batch["input_ids"]))
        result["reward"] = numbers(reward, batch, [whole[:4], whole[4:]])
    FILE.write_text("{\n" + ",\n".join(f'"{name}": {json.dumps(each)}' for name, each in result.items()) + "\n}\n")


if __name__ == "__main__":
    main()
