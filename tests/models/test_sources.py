"""What a rank reads of a weight is what transformers' operators make of the files, whatever order they come in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slimelite.models.sources import Recorder, stored

MADE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as it is": lambda x, y: x,
    "a part": lambda x, y: x[1:3],
    "stacked, then a half of each": lambda x, y: torch.stack([x, y]).chunk(2, 1)[1],
    "concatenated across": lambda x, y: torch.cat([x, y], 1),
    "transposed": lambda x, y: x.t(),
    "transposed, copied": lambda x, y: x.t().contiguous(),
    "transposed, cloned with its strides": lambda x, y: x.t().clone(),
    "transposed, cloned, a part": lambda x, y: x.t().clone()[1:3],
    "transposed, copied, viewed": lambda x, y: x.t().contiguous().view(3, 8),
    "transposed, copied, a part": lambda x, y: x.t().contiguous().chunk(2, 1)[1],
    "interleaved": lambda x, y: x.reshape(2, 2, 6).transpose(0, 1).reshape(4, 6).contiguous(),
    "interleaved, then halves": lambda x, y: (
        x.reshape(2, 2, 6).transpose(0, 1).reshape(4, 6).chunk(2, 0)[1].contiguous()
    ),
    "permuted for rotary embedding": lambda x, y: x.view(2, 2, 1, 6).transpose(1, 2).reshape(4, 6),
}


@pytest.mark.newest
@pytest.mark.parametrize("made", MADE)
def test_rows_are_those_of_the_whole(made: str, tmp_path: Path) -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    save_file({"x": x, "y": y}, tmp_path / "model.safetensors")
    with Recorder(stored([tmp_path / "model.safetensors"])) as recorder:
        empty = recorder.tensors()
        result = MADE[made](empty["x"], empty["y"])
        source = recorder.source(result)
    assert source is not None
    whole = MADE[made](x, y)
    assert source.shape == whole.shape
    for begin in range(len(whole)):
        assert torch.equal(source.rows(begin, len(whole)), whole[begin:]), begin
