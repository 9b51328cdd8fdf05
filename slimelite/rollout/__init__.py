"""Turns prompts into scored groups, with asynchronous generation, filters and partial rollouts. Also evaluates
models."""
