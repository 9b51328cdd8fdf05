"""Programs that read the results of a run, or serve its model."""
