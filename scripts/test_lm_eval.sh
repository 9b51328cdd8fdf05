#!/usr/bin/env bash
# Compare slimelite eval with lm-evaluation-harness: answers and likelihoods must be equal, row by row.
#
# lm-eval has its own environment, .venv-lm-eval, because its requirements exclude some of ours. It runs two local tasks
# on a model behind `slimelite serve`, through /v1/completions: one with choices, and one with written answers.
# `slimelite eval` runs the same rows. Then verdicts, likelihoods and answers are compared. MODEL is a model folder, by
# default SmolLM2-135M-Instruct (scripts/fetch_smollm2.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
MODEL=${MODEL:-data/SmolLM2-135M-Instruct} PYTHON=${PYTHON:-.venv/bin/python} VENV=${LM_EVAL_VENV:-.venv-lm-eval}
PINS=("lm-eval[api]==0.4.13" transformers==5.12.1 "huggingface-hub>=1.5,<2")
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false

if [[ ! -e "$VENV/.pinned" ]]; then
    "$PYTHON" -m venv --clear "$VENV"
    "$VENV/bin/pip" install --quiet "${PINS[@]}"
    touch "$VENV/.pinned"
fi
[[ -f "$MODEL/config.json" ]] || "$PYTHON" scripts/fetch_smollm2.py "$MODEL"

work=$(mktemp -d)
trap 'kill "${server:-0}" 2>/dev/null || true; rm -rf "$work"' EXIT
mkdir "$work/theirs" "$work/ours"
"$PYTHON" - "$work" <<'END'
import json, sys
from pathlib import Path

work = Path(sys.argv[1])
names = ["Ann", "Bob", "Eve", "Joe"]
asked = [(f"{names[i % 4]} has {i + 3} apples and buys {2 * i % 7 + 1} more. How many are there?", i + 4 + 2 * i % 7) for i in range(24)]
write = [{"question": q, "answer": str(a)} for q, a in asked]
choices = [{"question": q, "options": [f"{a - 1} apples", f"{a} apples in all", f"{a + 2}"], "right": 1} for q, a in asked]
for name, rows in (("write", write), ("choices", choices)):
    (work / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    theirs = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {work}/{name}.jsonl}}}}\ntest_split: test\n"
    ours = f"name: {name}\ndata: ../{name}.jsonl\n"
    if name == "choices":
        theirs += "output_type: multiple_choice\ndoc_to_choice: '{{options}}'\ndoc_to_target: right\nmetric_list: [{metric: acc}]\n"
        ours += "kind: multiple-choice\nchoices: options\nlabel: right\n"
    else:
        theirs += "output_type: generate_until\ndoc_to_target: '{{answer}}'\nmetric_list: [{metric: exact_match}]\n"
        theirs += 'generation_kwargs: {until: ["\\n\\n", "Question:"], do_sample: false, max_gen_toks: 48}\n'
        ours += 'label: answer\nscorer: f1\nstop: ["\\n\\n", "Question:"]\nmax_tokens: 48\n'
    (work / "theirs" / f"{name}.yaml").write_text(theirs + 'doc_to_text: "Question: {{question}}\\nAnswer:"\n')
    (work / "ours" / f"{name}.yaml").write_text(ours + 'prompt: "Question: {{question}}\\nAnswer:"\n')
END

"$PYTHON" -m slimelite.apps.command eval "$MODEL" --no-chat --output "$work/out" \
    --tasks "$work/ours/choices.yaml,$work/ours/write.yaml"
port=$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
url="http://127.0.0.1:$port/v1"
"$PYTHON" -m slimelite.apps.command serve "$MODEL" --port "$port" >"$work/serve.log" 2>&1 &
server=$!
until curl -sf "$url/models" >/dev/null; do
    kill -0 "$server" 2>/dev/null || { cat "$work/serve.log"; exit 1; }
    sleep 1
done
settings="model=model,tokenizer=$MODEL,base_url=$url/completions,num_concurrent=8,tokenized_requests=True,max_length=2048"
"$VENV/bin/lm_eval" run --model local-completions --model_args "$settings" --tasks choices,write \
    --include_path "$work/theirs" --output_path "$work/lm_eval" --log_samples >"$work/lm_eval.log" 2>&1 ||
    { tail -50 "$work/lm_eval.log"; exit 1; }

"$PYTHON" - "$work" <<'END'
import json, sys
from pathlib import Path

from slimelite.samples.table import SampleTable

work = Path(sys.argv[1])
pairs = {}
for name in ("choices", "write"):
    (log,) = (work / "lm_eval").rglob(f"samples_{name}_*.jsonl")
    theirs = sorted(map(json.loads, log.read_text().splitlines()), key=lambda row: row["doc_id"])
    (file,) = (work / "out").rglob(f"{name}-start.parquet")
    pairs[name] = theirs, SampleTable.from_parquet(file)
theirs, ours = pairs["choices"]
gaps = [
    abs(float(there[0][0]) - here)
    for row, metadata in zip(theirs, ours.metadata, strict=True)
    for there, here in zip(row["resps"], json.loads(metadata)["log_likelihoods"], strict=True)
]
verdicts = sum(row["acc"] == reward for row, reward in zip(theirs, ours.reward, strict=True))
print(f"choices: {verdicts} of {len(theirs)} verdicts are equal; largest of {len(gaps)} differences of log-likelihoods {max(gaps):.1e}")
theirs, ours = pairs["write"]
cut = [text.removesuffix("<|im_end|>").split("\n\n")[0].split("Question:")[0] for text in ours.response]
same = sum(row["resps"][0][0] == text for row, text in zip(theirs, cut, strict=True))
print(f"write: {same} of {len(theirs)} answers are equal")
assert verdicts == same == len(theirs)
assert max(gaps) < 1e-3
END
