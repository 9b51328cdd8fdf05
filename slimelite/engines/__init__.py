"""Inference engines behind one protocol: token ids in, token ids out."""
