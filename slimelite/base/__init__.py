"""Helpers for every package: files, locks, processes, HTTP, registries. They do not depend on other packages."""
