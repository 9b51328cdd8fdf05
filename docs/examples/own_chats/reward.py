"""1 if the reply ends with the right team.   --custom-rm-path docs/examples/own_chats/reward.py:team"""

import re


def team(args, sample):
    """The reward of one reply. The label is the team. A whole reply ends with the token <|im_end|>."""
    words = re.findall(r"\w+", sample.response.removesuffix("<|im_end|>"))
    return float(words[-1:] == [sample.label])
