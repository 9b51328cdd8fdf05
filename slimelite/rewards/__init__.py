"""Rewards: each sample gets a number. `grader` scores samples. The rules are records in `rules`."""
