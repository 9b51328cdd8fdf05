"""Models: families, files of a Hugging Face folder, checkpoints."""
