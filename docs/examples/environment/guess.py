"""Guess a number: each wrong guess narrows the bounds that the model sees."""

import re

from slimelite.environments.protocol import Start, Step


class Guess:
    """The label is the number, 0 to 36. A guess outside the bounds ends the episode."""

    def reset(self, row):
        self.number, self.low, self.high = int(row.label), 0, 36
        return Start([{"role": "user", "content": f"{self.low}+{self.high}=?"}])

    def step(self, reply):
        guess = int(re.findall(r"\d+", reply["content"] + " 99")[0])
        if guess == self.number or not self.low <= guess <= self.high:
            return Step(reward=float(guess == self.number), done=True)
        self.low, self.high = (guess + 1, self.high) if guess < self.number else (self.low, guess - 1)
        return Step([{"role": "user", "content": f"{self.low}+{self.high}=?"}], reward=-0.1)
