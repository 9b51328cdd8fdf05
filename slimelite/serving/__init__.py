"""Serves a model to programs: it turns messages into tokens and back, keeps sessions with exact tokens, and has the
HTTP front."""
