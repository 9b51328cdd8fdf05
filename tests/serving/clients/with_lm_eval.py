"""``lm-evaluation-harness`` against the front, by both of its APIs; `scripts/test_clients.sh` runs it.

`scripts/test_lm_eval.sh` compares its scores with those of `slimelite eval`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": os.environ["API_KEY"]}

import lm_eval  # it reads the environment
from lm_eval.tasks import TaskManager
from weather import RULED

MODEL = os.environ["TINY_MODEL"]
COMMON = "task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\ntest_split: test\n"
COMMON += 'doc_to_text: "Question: {{{{question}}}}\\nAnswer:"\n'
WRITE = "output_type: generate_until\ndoc_to_target: It is 42.\nmetric_list: [{metric: exact_match}]\n"
WRITE += 'generation_kwargs: {until: ["<|im_end|>"], do_sample: false, max_gen_toks: 48}\n'
CHOOSE = "output_type: multiple_choice\ndoc_to_choice: '{{options}}'\ndoc_to_target: right\n"
CHOOSE += "metric_list: [{metric: acc}]\n"


def results(folder: Path, model: str, url: str, task: str, **more: Any) -> dict[str, Any]:
    """The scores of a task."""
    settings = {"model": "ruled", "base_url": url, "tokenizer": MODEL, "max_length": 2000, "max_retries": 1}
    if "chat" not in model:
        settings |= {"tokenizer_backend": "huggingface", "tokenized_requests": True}
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    given: dict[str, Any] = {"model_args": settings, "tasks": [task], "task_manager": manager, **more}
    found = lm_eval.simple_evaluate(model=model, bootstrap_iters=0, **given)
    return dict(found["results"][task])


def main() -> None:
    rows = [{"question": f"What is {n} + {42 - n}?", "options": [" 41.", " 42."], "right": 1} for n in range(2)]
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        for name, kind in (("write", WRITE), ("choose", CHOOSE)):
            common = COMMON.format(name=name, file=folder / "rows.jsonl")
            (folder / f"{name}.yaml").write_text(common + kind)
        said = results(folder, "local-completions", f"{RULED}/v1/completions", "write")
        assert said["exact_match,none"] == 1, said
        chat = f"{RULED}/v1/chat/completions"
        said = results(folder, "local-chat-completions", chat, "write", apply_chat_template=True)
        assert said["exact_match,none"] == 1, said
        # log-likelihoods are the model's, so the scripted one has none
        said = results(folder, "local-completions", f"{os.environ['TINY_URL']}/v1/completions", "choose")
        assert 0 <= said["acc,none"] <= 1, said
    version = importlib.metadata.version("lm-eval")
    print(
        f"lm-eval {version}: a task with written answers, by `local-completions` and `local-chat-completions`, and one "
        "with choices, by log-likelihoods"
    )


if __name__ == "__main__":
    main()
