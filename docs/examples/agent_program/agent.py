"""Ask for a sum, with a second chance if it is wrong. The program knows nothing about training."""

import json
import os
import sys
import urllib.request


def ask(messages):
    """The model's message, as any client of OpenAI's API receives it."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = json.dumps({"model": "mine", "messages": messages}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]


row = json.loads(sys.stdin.readline())
messages = row["prompt"]
for chance in (1.0, 0.5):
    messages.append(ask(messages))
    if messages[-1]["content"].split()[-1:] == [row["label"]]:
        print(json.dumps({"reward": chance}))
        break
    messages.append(row["prompt"][0])
else:
    print(json.dumps({"reward": 0.0}))
