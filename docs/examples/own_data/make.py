"""Write 200 sums as jsonl or CSV:   python make.py FILE.jsonl|FILE.csv

The sums of a jsonl file have four numbers; those of a CSV file have two, which a small chat model learns in minutes.
"""

import csv
import json
import random
import sys
from pathlib import Path

random.seed(0)
file = Path(sys.argv[1])
file.parent.mkdir(parents=True, exist_ok=True)
with file.open("w", newline="") as out:
    if file.suffix == ".csv":
        table = csv.writer(out)
        table.writerow(["question", "answer"])
        for _ in range(200):
            a, b = random.randint(1, 9), random.randint(1, 9)
            table.writerow([f"{a} + {b} = ? Answer with the number only.", a + b])
    else:
        for _ in range(200):
            numbers = [random.randint(0, 9) for _ in range(4)]
            messages = [{"role": "user", "content": "+".join(map(str, numbers)) + "=?"}]
            row = {"messages": messages, "label": str(sum(numbers)), "metadata": {"largest": max(numbers)}}
            out.write(json.dumps(row) + "\n")
