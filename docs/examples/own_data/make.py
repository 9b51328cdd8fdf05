"""Write 200 sums as jsonl:   python make.py FILE"""

import json
import random
import sys
from pathlib import Path

random.seed(0)
lines = []
for _ in range(200):
    numbers = [random.randint(0, 9) for _ in range(4)]
    messages = [{"role": "user", "content": "+".join(map(str, numbers)) + "=?"}]
    lines.append(json.dumps({"messages": messages, "label": str(sum(numbers)), "metadata": {"largest": max(numbers)}}))
Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True)
Path(sys.argv[1]).write_text("\n".join(lines) + "\n")
