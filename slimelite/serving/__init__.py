"""Serves a model to programs. The package converts messages to tokens and back, keeps sessions with exact tokens, and
contains the HTTP front."""
