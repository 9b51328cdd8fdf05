"""Sandboxes, which separate the programs of a model or a user from the rest of the machine."""
