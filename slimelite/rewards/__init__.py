"""Rewards: a sample in, a number out. `grader` scores samples; the rules are records in `rules`."""
