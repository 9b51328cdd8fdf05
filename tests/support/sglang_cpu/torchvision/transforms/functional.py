def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise RuntimeError(f"{__name__}.{name} is not here")

    return missing
