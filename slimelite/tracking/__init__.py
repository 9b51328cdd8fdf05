"""The output of a run: console, run folder, metrics, plots."""
