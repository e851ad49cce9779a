"""What rank 0 has in memory, as a source: the module's real tensors, each freed as soon as it is sent."""

from __future__ import annotations

import torch

from metashard.fill.collective import Runs
from metashard.fill.target import Target


class Memory:
    """Source over real tensors.

    Args:
        tensors: Name -> full tensor. A tensor is taken out as soon as all of it has been packed, so that its memory is
            freed if nobody else holds it; the caller hands over the dictionary.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def pack(self, target: Target, runs: Runs, out: torch.Tensor) -> None:
        tensor = self.tensors[target.fqn]
        assert tensor.dtype == target.dtype, f"{target.fqn}: {tensor.dtype} in memory, {target.dtype} in the layout"
        if not tensor.is_contiguous():
            self.tensors[target.fqn] = tensor = tensor.contiguous()
        flat = tensor.reshape(-1)
        for first, at, count in runs:
            out[at : at + count].copy_(flat[first : first + count])

    def done(self, target: Target) -> None:
        self.tensors.pop(target.fqn, None)
