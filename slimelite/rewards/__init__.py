"""Rewards: a sample in, a number out.

`grader` scores samples; `rules` is the registry. Nothing is imported here, so that the registry stays free of the rest.
"""
