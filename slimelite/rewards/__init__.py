"""Rewards. A reward is a number for one sample. The module `grader` scores samples. The reward rules are records in the
module `rules`."""
