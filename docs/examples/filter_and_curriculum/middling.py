"""Keep groups that are neither too easy nor too hard."""

from slimelite.rollout.filters import DynamicFilterOutput


def keep(args, samples):
    """Groups with a mean reward above 0.05 and below 0.95."""
    mean = sum(sample.reward for sample in samples) / len(samples)
    if mean >= 0.95:
        return DynamicFilterOutput(keep=False, reason="too_easy")
    return DynamicFilterOutput(keep=mean > 0.05, reason=None if mean > 0.05 else "too_hard")
