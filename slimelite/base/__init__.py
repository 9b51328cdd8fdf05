"""What every room uses and which knows none of them: files, locks, processes, HTTP, registries."""
