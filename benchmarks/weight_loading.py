#!/usr/bin/env python3
"""Loading throughput of a folder's safetensors files, on one device or under torchrun on many.

    python benchmarks/weight_loading.py --model-path MODEL --subfolder transformer
    torchrun --nproc-per-node 8 benchmarks/weight_loading.py --model-path MODEL --subfolder transformer --cold

Two modes:

- cpu: every rank maps the files into host memory, as safetensors does, and touches every byte. Nothing travels.
- broadcast: the first rank of each host reads every tensor to its device and broadcasts it to the host's other ranks.
  Without torchrun that is one rank, which reads to its device.

Ranks take an accelerator each where there are enough of them, else the CPU. With --cold the files are evicted from the
page cache before every run, which is verified; without it they stay as the run before left them, which after a warm-up
is in the cache as far as there is room.

Prints for each mode the average and the best time (of the slowest rank), throughput, tensors and GB. Throughput is told
twice: by the bytes of the checkpoint, each once, and by the bytes that one rank ended up with. At the end every rank
hashes what it has, off the clock: modes and ranks must agree.

Exit code: 0; 1 if what modes or ranks ended up with differs; 2 for bad input, with one line that says why.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from preflight import command_line
from weight_cli import parser, run
from weight_modes import BROADCAST, MAPPED


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    args = parser(__doc__).parse_args(argv)
    return command_line("weight_loading", lambda: run(args, (MAPPED, BROADCAST)))


if __name__ == "__main__":
    sys.exit(main())
