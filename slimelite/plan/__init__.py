"""Predicts memory, time and traffic of a run from the model's shapes: whether it fits, why not, and how fast it is."""
