"""Computes rewards. A reward is a number for one sample. The module `grader` scores samples. The module `rules`
contains a record for each reward rule."""
