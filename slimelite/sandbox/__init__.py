"""Boxes: what runs the programs of a model and of a user apart from the rest of the machine."""
