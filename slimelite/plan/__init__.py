"""Will it fit, how fast, and why not: memory, time and traffic of a run from the shapes of its model."""
