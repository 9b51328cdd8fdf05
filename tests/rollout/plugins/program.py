"""An agent that is a program: it asks twice, says what it was told, and then does what its arguments say."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

FOLDER, WAYS = Path(sys.argv[1]), sys.argv[2].split(",")


def ask(messages: list[dict[str, str]]) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    fields = {"model": "any", "messages": messages} | ({"max_tokens": 64000} if "long" in WAYS else {})
    body = json.dumps(fields).encode()
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]


row = json.loads(sys.stdin.readline())
way = WAYS[row["metadata"]["number"] % len(WAYS)]
if way == "silent":
    sys.exit(0)
messages = list(row["prompt"])
for _ in range(2):
    messages += [ask(messages), {"role": "user", "content": "2+3=?"}]
if way == "hang":
    child = subprocess.Popen(["sleep", "600"])
    (FOLDER / "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
if way == "child":  # it holds stdout open
    (FOLDER / "pids").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
if way == "late":  # after the one that hangs
    while not (FOLDER / "pids").exists():
        time.sleep(0.05)
if way == "fail":
    sys.exit("no idea")
if way == "loud":
    print("x" * 3_000_000)
if way == "strange":
    print(json.dumps({"reward": "much"}))
if way == "huge":
    print('{"reward": 1' + "0" * 400 + "}")
if way in ("reward", "loud", "child", "deep", "long"):
    print(json.dumps({"reward": 0.5}))
if way == "deep":
    print("[" * 60_000)
