"""Weights as ``update_weights_from_tensor`` reads them: a pickle for each tensor-parallel rank, as base64 in JSON."""

from __future__ import annotations

import base64
import io
import pickle
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from slimelite.engines.protocol import WeightBucket

# where `torch.multiprocessing.reductions.rebuild_cuda_tensor` is told the device
DEVICE_ARGUMENT = 6


def pickled(bucket: WeightBucket) -> bytes:
    """The bucket in SGLang's ``flattened_bucket`` format.

    A tensor in host memory travels by value (torch's shared memory would tie the server to our process), one on a GPU
    as a CUDA IPC handle: keep it until the server has answered.
    """
    metadata = []
    end = 0
    for name, tensor in bucket.tensors():
        start, end = end, end + tensor.nbytes
        metadata.append(
            # stands for SGLang's FlattenedTensorMetadata, which is read by attribute; its unpickler admits `types`
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end, numel=tensor.nbytes
            )
        )
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(
        {"flattened_tensor": bucket.flat.view(torch.uint8), "metadata": metadata}
    )
    return buffer.getvalue()


def update_request(blobs: list[bytes]) -> bytes:
    """The JSON body for the pickles of all ranks; the cache is flushed once, at the end, not here."""
    # base64 needs no escapes: joining is a copy less per blob than json.dumps
    quoted = b",".join(b'"%b"' % base64.b64encode(blob) for blob in blobs)
    return b'{"serialized_named_tensors":[%b],"load_format":"flattened_bucket","flush_cache":false}' % quoted


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        # a tensor in host memory goes torch's own way, one of the few that SGLang 0.5.23 unpickles
        if not (isinstance(value, Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reduce_tensor(value)
        # two processes may number the same GPU differently: SGLang finds it by its UUID
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])
