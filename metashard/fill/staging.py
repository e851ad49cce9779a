"""Bytes from a file to memory that cannot take them as they are: another dtype, or an accelerator.

The one place with pinned memory and side streams. A `Staging` belongs to one thread and has a fixed size. On CPU it is
one buffer, cast from piece by piece. For an accelerator it is a ring of two pinned buffers and a stream of its own:
while one buffer's bytes travel to the device (and are cast there, from a device buffer of the same fixed size), the
thread reads the next ones into the other.
"""

from __future__ import annotations

import torch

from metashard.fill.bytes import as_bytes, as_dtype


class Staging:
    """One thread's staging buffers.

    Args:
        device: Where the bytes end up.
        nbytes: Size of all buffers in host memory together; on an accelerator at most half of it again on the device.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        self.ring: list[torch.Tensor] = []
        self.turn = 0
        if device.type == "cpu":
            self.ring = [torch.empty(nbytes, dtype=torch.uint8)]
            return
        self.ring = [torch.empty(nbytes // 2, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.copied: list[torch.Event | None] = [None, None]
        self.stream = torch.Stream(device)
        self.on_device: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that one `buffer` holds."""
        return self.ring[0].numel()

    def buffer(self) -> torch.Tensor:
        """The next buffer to read into (1-D uint8, CPU); waits until what it held before has been copied."""
        if self.device.type != "cpu":
            event = self.copied[self.turn]
            if event is not None:
                event.synchronize()
        return self.ring[self.turn]

    def land(self, dtype: torch.dtype, into: torch.Tensor, *, run: int, stride: int) -> None:
        """Bring what is staged to `into` (1-D), cast to its dtype.

        On an accelerator this returns before the copy is done; `finish` waits for it.

        Args:
            dtype: Dtype of what is staged.
            into: Takes every run of the buffer, one after the other.
            run: Elements of a run.
            stride: Elements from the start of one run to the next.
        """
        staged = self.ring[self.turn]
        repeats = into.numel() // run
        extent = (repeats - 1) * stride + run

        def runs_of(raw: torch.Tensor) -> torch.Tensor:
            return as_dtype(raw, dtype, extent).as_strided((repeats, run), (stride, 1))

        if self.device.type == "cpu":
            into.view(repeats, run).copy_(runs_of(staged))
            return
        nbytes = extent * dtype.itemsize
        with self.stream:
            if into.dtype == dtype and repeats == 1:
                as_bytes(into).copy_(staged[:nbytes], non_blocking=True)
            else:
                if self.on_device is None:
                    self.on_device = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
                self.on_device[:nbytes].copy_(staged[:nbytes], non_blocking=True)
                into.view(repeats, run).copy_(runs_of(self.on_device))
            event = torch.Event(self.device)
            event.record(self.stream)
        self.copied[self.turn] = event
        self.turn = 1 - self.turn

    def finish(self) -> None:
        """Wait for all copies."""
        if self.device.type != "cpu":
            self.stream.synchronize()
