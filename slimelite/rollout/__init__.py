"""Turns prompts into scored groups, with asynchronous generation, filters and partial rollouts. This package also
evaluates models."""
