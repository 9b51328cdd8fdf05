"""Real SGLang servers behind the engine protocol."""
