"""Programs that read what a run wrote or serve what it made."""
