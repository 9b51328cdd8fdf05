"""Model families, the files of a Hugging Face folder, and checkpoints."""
