#!/usr/bin/env python3
"""Ways to get a checkpoint's tensors to the ranks, side by side: everybody reads, one reads and broadcasts, shards.

    torchrun --nproc-per-node 8 benchmarks/weight_loading_comparison.py --model-path MODEL --subfolder transformer

Modes:

- independent: every rank reads every tensor to its device.
- broadcast: the first rank of each host reads every tensor to its device and broadcasts it to the host's other ranks,
  one after the other (sync).
- broadcast/async: the same, but it reads on while broadcasts are on their way.
- scatter: metashard's strategy "stream": the first rank of each host reads in pieces and sends each rank its shards.
- direct: metashard's strategy "direct": every rank reads the bytes of its own shards; replicated tensors are read once.

The first three end with every tensor on every rank, the last two with shards. As no model class is needed, a flat
nn.Module with the checkpoint's tensors as its parameters, sharded by fully_shard on dim 0, stands in for the model; it
is made off the clock, its memory is allocated on the clock.

Prints for each mode the average and the best time (of the slowest rank), throughput, tensors and GB, then speedups and
seconds saved against `independent` and against `broadcast`. Throughput is told twice, as the modes end with different
things: by the bytes of the checkpoint, each once, and by the bytes that one rank ended up with. At the end every rank
hashes what it has, off the clock, in the parts that FSDP cuts: every mode's must be the same.

Ranks take an accelerator each where there are enough of them, else the CPU. With --cold the files are evicted from the
page cache before every run, which is verified.

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
from weight_modes import BROADCAST, BROADCAST_ASYNC, DIRECT, INDEPENDENT, SCATTER

MODES = (INDEPENDENT, BROADCAST, BROADCAST_ASYNC, SCATTER, DIRECT)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    args = parser(__doc__).parse_args(argv)
    return command_line(
        "weight_loading_comparison", lambda: run(args, MODES, baselines=(INDEPENDENT.name, BROADCAST.name))
    )


if __name__ == "__main__":
    sys.exit(main())
