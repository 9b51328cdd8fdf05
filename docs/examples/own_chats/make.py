"""Make up chats of a bicycle shop:   python docs/examples/own_chats/make.py FOLDER

A customer writes, and the assistant answers in one sentence and names the team that takes over. It writes four files.
``sft.jsonl`` has whole chats. ``pairs.jsonl`` has a short and a long reply to the same message. ``train.jsonl`` and
``test.jsonl`` have messages with the right team. The requests in ``test.jsonl`` are in no other file.
"""

import json
import random
import sys
from pathlib import Path

# the customers' requests, by team; the last four of each team are only for the test
WANTS = {
    "workshop": [
        "my brakes squeal", "the chain jumps off", "a spoke is broken", "the gears slip", "my tyre is flat",
        "the saddle is loose", "the fork makes a noise", "my headlight went out", "the pedal fell off",
        "the wheel wobbles", "the crank is bent", "the cable snapped",
        "the bell is stuck", "the frame has a crack", "my tube leaks", "the bearings grind",
    ],
    "orders": [
        "my parcel has not arrived", "the helmet came in the wrong size", "I want to change my delivery address",
        "when will the red jacket ship", "you sent two locks instead of one", "is the blue basket in stock",
        "the tracking number does not work", "I want to cancel my order", "the box was empty",
        "the gloves I bought are too small", "do you deliver to Norway", "the pump is missing from my package",
        "the bag never came", "I want to send the shoes back", "can you ship the tent faster",
        "is the pink bottle sold out",
    ],
    "billing": [
        "I was charged twice", "my invoice has the wrong name", "the discount was not applied", "can I pay by card",
        "I need a receipt for my taxes", "my refund has not come", "the price on the bill is wrong",
        "may I pay in three parts", "my card was declined", "the voucher does not work", "you took too much money",
        "where do I send the payment",
        "I never got my money back", "the bill says 90 euros and I agreed to 80", "do you take cash",
        "I need a copy of the invoice",
    ],
    "rental": [
        "I want to rent two bikes on Sunday", "how much is a tandem for a day", "can I keep the rental bike longer",
        "do you lend child seats", "I want to book an e-bike for a week", "is there a deposit for the rental",
        "can we pick the hired bikes up at six", "I brought the rented bike back late",
        "do you have bikes for hire near the station", "we need five bikes for a tour",
        "is a helmet included when I rent", "can I reserve a cargo bike for Friday",
        "I want to borrow a trailer for a day", "can I hire a bike for my daughter", "we would like to book a tandem",
        "until when must I return the hired bike",
    ],
}  # fmt: skip
OPENINGS = ["Hello, ", "Hi! ", "Good morning, ", "Dear team, ", "Sorry to bother you, but ", ""]
ENDINGS = ["", " Thanks.", " Please help.", " What can I do?", " Best, Kim"]
HELD_OUT = 4
SHORT = "Thank you for your message. Team: {team}"
LONG = (
    "Thank you very much for taking the time to write to us today. We are always happy to hear from our customers, "
    "and we will look into it as soon as we possibly can. Team: {team}"
)


def message(chance, wants):
    """What a customer writes."""
    return chance.choice(OPENINGS) + chance.choice(wants) + "." + chance.choice(ENDINGS)


def row(chance, file, question, team):
    """A row of one of the files."""
    asked = [{"role": "user", "content": question}]
    short, long = SHORT.format(team=team), LONG.format(team=team)
    if file == "sft":
        return {"messages": [*asked, {"role": "assistant", "content": chance.choice([short, long])}]}
    if file == "pairs":
        return {"prompt": asked, "chosen": short, "rejected": long}
    return {"messages": asked, "label": team}


def main(folder):
    """Write the four files."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {"sft": 96, "pairs": 64, "train": 256, "test": 48}
    for name, count in counts.items():
        chance, rows = random.Random(name), []
        for i in range(count):
            team = list(WANTS)[i % len(WANTS)]
            wants = WANTS[team][-HELD_OUT:] if name == "test" else WANTS[team][:-HELD_OUT]
            # these chats, as if written by hand, cover a third of the requests
            question = message(chance, wants[:4] if name == "sft" else wants)
            rows.append(row(chance, name, question, team))
        chance.shuffle(rows)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"wrote {', '.join(f'{name}.jsonl ({count} rows)' for name, count in counts.items())} to {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
