"""Predicts from the model's shapes whether a run fits, why it does not fit, and how fast it is (memory, time and
traffic)."""
