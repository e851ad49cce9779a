"""Strategy `stream`: a leader reads the files entry by entry, straight into the buckets that it sends."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from metashard.checkpoint import Entry
from metashard.fill.collective import Runs
from metashard.fill.reader import Files, Read, place
from metashard.fill.target import Target


class FileSource:
    """Source over weight files; holds no tensor, only `staging` for bytes that need a cast or another device.

    Args:
        files: The open files.
        entries: Target name -> its entry.
        staging: 1-D uint8 CPU buffer.
    """

    def __init__(self, files: Files, entries: Mapping[str, Entry], staging: torch.Tensor) -> None:
        self.files, self.entries, self.staging = files, entries, staging

    def pack(self, target: Target, runs: Runs, out: torch.Tensor) -> None:
        entry = self.entries[target.fqn]
        step = self.staging.numel() // entry.dtype.itemsize
        for first, at, count in runs:
            for done in range(0, count, step):
                n = min(step, count - done)
                place(self.files, Read(entry, first + done, out[at + done : at + done + n]), self.staging)

    def done(self, target: Target) -> None:
        """Nothing is kept."""
