"""Prompts to scored groups: asynchronous generation, filters, partial rollouts, evaluation."""
