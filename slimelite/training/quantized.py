"""Frozen linear layers in 4 bits, as in QLoRA (arXiv:2305.14314). The format is NF4 in blocks of 64 numbers. The scales
of the blocks are quantized too. bitsandbytes computes with these weights on GPUs and on CPUs.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

# BLOCK weights share a scale. The scales are quantized too, and SCALES of them share a scale
BLOCK, SCALES = 64, 256
# buffers of a quantized layer, which rank 0 computes
STATE = ("absmax", "scales", "offset")
# attribute of a parameter without data: its position in the files, see `models.sources`
SOURCE = "_slimelite_source"


class FrozenLinear(nn.Linear):
    """W x + b with a frozen W. After `quantize`, W has 4 bits, and ``weight`` is uint8 [out, in / 2].

    The two numbers in a byte are neighbours in a row of W. So FSDP can shard the weight by rows like any other weight.
    """

    absmax: Tensor
    scales: Tensor
    offset: Tensor

    @property
    def is_quantized(self) -> bool:
        """Whether the weight has 4 bits."""
        return self.weight.dtype == torch.uint8

    @property
    def outline(self) -> Tensor:
        """A tensor [out, in] without data, which has the shape of the dequantized weight."""
        return torch.empty(self.out_features, self.in_features, device="meta")

    @torch.no_grad()
    def quantize(self) -> None:
        """Quantize the weight to 4 bits. On the meta device, only the shapes and dtypes change."""
        count, device = self.weight.numel(), self.weight.device
        packed = torch.empty(self.out_features, self.in_features // 2, dtype=torch.uint8, device=device)
        blocks = -(-count // BLOCK)
        state = {
            "absmax": torch.empty(blocks, dtype=torch.uint8, device=device),
            "scales": torch.empty(-(-blocks // SCALES), device=device),
            "offset": torch.empty((), device=device),
        }
        if not self.weight.is_meta:
            from bitsandbytes.functional import quantize_4bit

            flat, own = quantize_4bit(self.weight.data, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
            packed = flat.view(packed.shape)
            state = {"absmax": own.absmax, "scales": own.state2.absmax, "offset": own.offset}
        source = getattr(self.weight, SOURCE, None)
        self.weight = nn.Parameter(packed, requires_grad=False)
        setattr(self.weight, SOURCE, source)
        for name, tensor in state.items():
            self.register_buffer(name, tensor, persistent=False)

    @torch.no_grad()
    def quantized(self, weight: Tensor) -> Tensor:
        """[out, in / 2] the fp32 ``weight``, quantized. The scales of the quantized weight are stored in the buffers of
        this layer. The parameter of this layer, which may be sharded, is not changed."""
        alone = FrozenLinear(self.in_features, self.out_features, bias=False, device="meta")
        alone.weight = nn.Parameter(weight, requires_grad=False)
        alone.quantize()
        for name in STATE:
            getattr(self, name).copy_(getattr(alone, name))
        return alone.weight

    def product(self, x: Tensor) -> Tensor:
        """W x + b [..., out] of ``x`` [..., in]. The backward pass dequantizes the weight again."""
        if not self.is_quantized:
            return F.linear(x, self.weight, self.bias)
        from bitsandbytes import matmul_4bit

        result: Tensor = matmul_4bit(x, self.weight.view(-1, 1), self._state(x.device, x.dtype), bias=self.bias)
        return result

    def forward(self, x: Tensor) -> Tensor:
        """W x + b [..., out] of ``x`` [..., in]."""
        return self.product(x)

    def dequantized(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """[out, in] the dequantized weight. ``packed``: the whole ``weight`` [out, in / 2], not a shard of it."""
        from bitsandbytes.functional import dequantize_4bit

        result: Tensor = dequantize_4bit(packed.reshape(-1, 1), self._state(packed.device, dtype))
        return result

    def _state(self, device: torch.device, dtype: torch.dtype) -> QuantState:
        from bitsandbytes.functional import QuantState

        absmax, scales, offset = (getattr(self, name).to(device) for name in STATE)
        code, code_of_scales = (table.to(device) for table in _tables())
        nested = QuantState(absmax=scales, code=code_of_scales, blocksize=SCALES, dtype=torch.float32)
        return QuantState(
            absmax=absmax,
            shape=torch.Size((self.out_features, self.in_features)),
            code=code,
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=dtype,
            offset=offset,
            state2=nested,
        )


@cache
def _tables() -> tuple[Tensor, Tensor]:
    """The values of the 16 codes of NF4, and of the 256 codes of the quantized scales."""
    from bitsandbytes.functional import quantize_4bit

    _, state = quantize_4bit(torch.ones(BLOCK), blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    return state.code, state.state2.code
