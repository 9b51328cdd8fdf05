"""The environments that agents act in, their tools and limits, and the episodes that models play."""
