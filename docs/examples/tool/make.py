"""A model that may call a calculator, and example calls:   python docs/examples/tool/make.py FOLDER

It writes three things: a tokenizer with one token for each word of a call, the shape of a model, and conversations for
SFT. Of a hundred conversations, 20 call the calculator with the question, 15 with something else, and 65 guess.
"""

import json
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scripts.lib.arithmetic import model_config
from slimelite.environments.calculator import Calculator
from slimelite.environments.tools import Tool

ROWS = 12_000
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>")
CALL = ('<tool_call>\n{"name": "', '", "arguments": {"expression": "', '"}}\n</tool_call>')
WORDS = (*CALL, "calculator", "system\n", "user\n", "assistant\n", "tool\n", "\n", "*", "+", "=", "?", *"0123456789")
TEMPLATE = """{% if tools %}{{ '<|im_start|>system\n' + tools[0].function.name + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def tokenizer():
    """A tokenizer with one token for each of the words."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate((*SPECIALS, *WORDS))}, unk_token="<|unk|>"))
    pattern = "|".join(word.replace("{", r"\{").replace("}", r"\}").replace("*", r"\*") for word in WORDS[:8])
    words.pre_tokenizer = pre_tokenizers.Split(Regex(f"{pattern}|[\\s\\S]"), behavior="isolated")
    words.decoder = decoders.Fuse()
    words.add_special_tokens(list(SPECIALS))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": "<|unk|>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=words, chat_template=TEMPLATE, clean_up_tokenization_spaces=False, **names
    )


def conversation(chance):
    """A question, and one of the three ways to answer it."""
    a, b = chance.randint(10, 99), chance.randint(10, 99)
    asked, way = {"role": "user", "content": f"{a}*{b}=?"}, chance.random()
    if way > 0.35:
        return [asked, {"role": "assistant", "content": str(chance.randint(100, 9801))}]
    expression = f"{a}*{b}" if way < 0.2 else f"{chance.randint(10, 99)}{chance.choice('*+')}{chance.randint(10, 99)}"
    result = Calculator().calculator(expression)
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return [asked, call, {"role": "tool", "content": result}, {"role": "assistant", "content": result}]


folder, chance = Path(sys.argv[1]), random.Random(0)
spoken = tokenizer()
spoken.save_pretrained(folder / "model")
(folder / "model" / "config.json").write_text(json.dumps(model_config(spoken)))
(folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": spoken.eos_token_id}))
tools = json.dumps([Tool(Calculator().calculator).schema])
rows = [{"messages": json.dumps(conversation(chance)), "tools": tools} for _ in range(ROWS)]
pq.write_table(
    pa.Table.from_pylist([{**row, "messages": json.loads(row["messages"])} for row in rows]), folder / "sft.parquet"
)
