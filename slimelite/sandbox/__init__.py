"""Sandboxes. A sandbox isolates programs of a model or a user from the rest of the machine."""
