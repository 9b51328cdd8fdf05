"""FSDP2 training of Hugging Face models on tables of samples. `trainer.Trainer` is the entry point."""
