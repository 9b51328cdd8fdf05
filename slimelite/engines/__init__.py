"""Token-in, token-out inference behind one protocol."""
