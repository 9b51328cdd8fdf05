"""Predicts whether a run fits, how fast it is, and why it does not fit: memory, time and traffic from the model's
shapes."""
