"""Trains Hugging Face models on tables of samples with FSDP2. `trainer.Trainer` is the entry point."""
