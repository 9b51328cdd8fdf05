"""Moves a trainer's tensors between device and host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from slimelite.training.parallel import local

# a power of two, because torch rounds other sizes of pinned memory up to the next power of two
BLOCK_BYTES = 2**26


class HostMemory:
    """Host memory that keeps the data of device tensors while something else, such as an engine, uses the device.

    The memory is pinned. It is allocated in blocks when `offload` needs it, and is reused by later calls. Copies to
    newly allocated, pageable memory are several times slower. The tensor objects stay the same, so references to them
    stay valid. Only the device storage of the tensors is freed and later filled again.

    Args:
        tensors: a function that returns the tensors, sharded or not. Every `offload` calls it, because optimizers
            create their state late.
        device: the tensors' device.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._blocks: list[Tensor] = []
        # address of an offloaded device storage -> (the storage, its offset in host memory, its size) [bytes]
        self.away: dict[int, tuple[torch.UntypedStorage, int, int]] = {}

    def offload(self, *, unchanged: bool = False) -> None:
        """Copy every tensor to host memory and free its memory on the device.

        ``unchanged``: the tensors have not changed since the last `onload`, so the old copies are still valid.
        """
        if self.away:
            return
        copied = unchanged and bool(self._blocks)
        end = 0
        for tensor in self._tensors():
            storage = local(tensor).untyped_storage()
            if not storage.nbytes() or storage._cdata in self.away:
                continue
            self.away[storage._cdata] = (storage, end, storage.nbytes())
            if not copied:
                self._copy(storage, end, storage.nbytes(), to_device=False)
            end += storage.nbytes()
        self._wait()
        for storage, _, _ in self.away.values():
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Allocate the memory on the device again and fill it."""
        for storage, start, size in self.away.values():
            storage.resize_(size)
            self._copy(storage, start, size, to_device=True)
        self._wait()
        self.away.clear()

    @contextmanager
    def present(self, tensor: Tensor) -> Iterator[None]:
        """A context in which ``tensor`` can be read on the device, even if it is offloaded."""
        storage = local(tensor).untyped_storage()
        if storage._cdata not in self.away:
            yield
            return
        _, start, size = self.away[storage._cdata]
        storage.resize_(size)
        self._copy(storage, start, size, to_device=True)
        try:
            yield
        finally:
            storage.resize_(0)

    def _copy(self, storage: torch.UntypedStorage, start: int, size: int, *, to_device: bool) -> None:
        """Copy the whole ``storage`` to or from host memory. In host memory its bytes begin at ``start``, and may span
        several blocks."""
        theirs = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        while len(self._blocks) * BLOCK_BYTES < start + size:
            pinned = self._device.type == "cuda"
            self._blocks.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned))
        done = 0
        while done < size:
            block, first = divmod(start + done, BLOCK_BYTES)
            count = min(size - done, BLOCK_BYTES - first)
            here, there = self._blocks[block][first : first + count], theirs[done : done + count]
            if to_device:
                there.copy_(here, non_blocking=True)
            else:
                here.copy_(there, non_blocking=True)
            done += count

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
