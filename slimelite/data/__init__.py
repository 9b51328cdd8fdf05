"""Reads prompts from files, applies chat templates, computes loss masks, and hands out groups of samples."""
