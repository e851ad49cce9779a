"""What rank 0 has in memory, as a source: the module's real tensors, each freed as soon as it is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from metashard.fill.bytes import as_bytes
from metashard.fill.collective import Parcel
from metashard.fill.staging import Staging
from metashard.fill.target import Target


class Memory:
    """Source over real tensors.

    Args:
        tensors: Name -> full tensor. A tensor is taken out as soon as all of it has been packed, so that its memory is
            freed if nobody else holds it; the caller hands over the dictionary.
        device: Where parcels go.
        staging_bytes: Size of the pinned staging for an accelerator; unused on CPU.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], *, device: torch.device, staging_bytes: int) -> None:
        self.tensors = tensors
        self.staging = None if device.type == "cpu" else Staging(device, staging_bytes)

    def pack(self, parcels: Sequence[Parcel]) -> None:
        for target, runs, out in parcels:
            tensor = self.tensors[target.fqn]
            assert tensor.dtype == target.dtype, f"{target.fqn}: {tensor.dtype} in memory, {target.dtype} in the layout"
            if not tensor.is_contiguous():
                self.tensors[target.fqn] = tensor = tensor.contiguous()
            flat = tensor.reshape(-1)
            for first, at, count in runs:
                self._copy(flat[first : first + count], out[at : at + count])
        if self.staging is not None:
            self.staging.finish()

    def _copy(self, source: torch.Tensor, out: torch.Tensor) -> None:
        if self.staging is None or source.device.type != "cpu" or out.device.type == "cpu":
            out.copy_(source)
            return
        step = self.staging.nbytes // source.dtype.itemsize
        for start in range(0, source.numel(), step):
            piece = source[start : start + step]
            self.staging.buffer()[: piece.nbytes].copy_(as_bytes(piece))
            n = piece.numel()
            self.staging.land(piece.dtype, out[start : start + n], run=n, stride=n)

    def done(self, target: Target) -> None:
        self.tensors.pop(target.fqn, None)
