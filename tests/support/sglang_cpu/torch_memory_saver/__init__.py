"""A memory saver that saves no memory on a CPU and loses what the real one loses (0.0.10): weights that were made in a
region without backup are not numbers after `pause`.

SGLang's KV cache and CUDA graphs need nothing: it flushes the one and has none of the other here.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__version__ = "0.0.10"


class Saver:
    enabled = True

    def __init__(self) -> None:
        self._regions: dict[str, list[tuple[torch.Tensor, bool]]] = {}
        self._backups: dict[str, list[torch.Tensor]] = {}

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        """What modules that are made in it hold belongs to ``tag``."""
        before = {id(thing) for thing in gc.get_objects() if isinstance(thing, torch.nn.Module)}
        yield
        made = [t for t in gc.get_objects() if isinstance(t, torch.nn.Module) and id(t) not in before]
        held = {id(t): t for module in made for t in (*module.parameters(False), *module.buffers(False))}
        self._regions.setdefault(tag, []).extend((tensor, enable_cpu_backup) for tensor in held.values())

    @torch.inference_mode()
    def pause(self, tag: str) -> None:
        """Keep what has a backup, and lose the rest."""
        self._backups[tag] = [tensor.clone() for tensor, backed in self._regions.get(tag, []) if backed]
        for tensor, _ in self._regions.get(tag, []):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)

    @torch.inference_mode()
    def resume(self, tag: str) -> None:
        """Bring back what has a backup."""
        backed = [tensor for tensor, has_backup in self._regions.get(tag, []) if has_backup]
        for tensor, kept in zip(backed, self._backups.pop(tag), strict=True):
            tensor.copy_(kept)


torch_memory_saver = Saver()


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Nothing to load before the process."""
    yield
