"""Looks at runs while they train or afterwards: ``slimelite plot RUN``. It never writes into a run folder."""
