"""Helpers for every package: files, locks, processes, HTTP, registries. These helpers do not depend on other packages
of slimelite."""
