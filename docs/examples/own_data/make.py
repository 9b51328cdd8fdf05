"""Write 200 sums as jsonl or CSV:   python make.py FILE.jsonl|FILE.csv"""

import csv
import json
import random
import sys
from pathlib import Path

random.seed(0)
file = Path(sys.argv[1])
file.parent.mkdir(parents=True, exist_ok=True)
with file.open("w", newline="") as out:
    table = csv.writer(out)
    if file.suffix == ".csv":
        table.writerow(["question", "answer"])
    for _ in range(200):
        numbers = [random.randint(0, 9) for _ in range(4)]
        question, answer = "+".join(map(str, numbers)) + "=?", str(sum(numbers))
        if file.suffix == ".csv":
            table.writerow([question, answer])
        else:
            messages = [{"role": "user", "content": question}]
            row = {"messages": messages, "label": answer, "metadata": {"largest": max(numbers)}}
            out.write(json.dumps(row) + "\n")
