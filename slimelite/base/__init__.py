"""Helpers that every package uses and that depend on none of them: files, locks, processes, HTTP, registries."""
