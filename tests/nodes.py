"""What a rank of `torchrun --nnodes 2` does in tests/test_multinode.py; both agents run on one machine.

Each agent's ranks say another host name, and look for files in a folder of their own: node-local storage.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import metashard
from metashard.agree import Agreement, mesh_ranks
from tests import zoo
from tests.parity import cpu_mesh, differences

NAME = "SD3Transformer2DModel"


def load(checkpoint: str | Path, component: str | None, reference: Path) -> dict[str, Any]:
    """One load, compared with `from_pretrained`."""
    module, report = metashard.load_component(
        checkpoint,
        component,
        mesh=cpu_mesh(),
        dtype=torch.bfloat16,
        load=metashard.LoadPolicy(timeout=60),
        output_loading_info=True,
    )
    return {
        "found": differences(module, zoo.CASES[NAME].load(reference, torch.bfloat16)),
        "strategy": report.strategy,
        "reason": report.reason,
        "read": [rank.bytes_read for rank in report.ranks],
        "sent": [rank.bytes_sent for rank in report.ranks],
    }


def from_hub(work: Path, node: Path, reference: Path) -> dict[str, Any]:
    """By id, with an empty cache on each node; what is downloaded is copied from a full cache, and noted down."""
    import huggingface_hub
    from huggingface_hub import constants

    original, cache = huggingface_hub.snapshot_download, node / "hub"
    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = str(cache), True

    def download(*args: Any, local_files_only: bool = False, **kwargs: Any) -> str:
        if not local_files_only:
            with open(node / "downloads", "a") as log:
                log.write(f"{dist.get_rank()}\n")
            if not cache.exists():
                shutil.copytree(work / "hub", cache, symlinks=True)
        return original(*args, local_files_only=True, cache_dir=cache, **kwargs)

    huggingface_hub.snapshot_download = download
    try:
        return load("org/name", "transformer", reference)
    finally:
        huggingface_hub.snapshot_download = original


def main(work: Path) -> None:
    """All cases, and what this rank has seen of them."""
    number = os.environ["GROUP_RANK"]
    socket.gethostname = lambda: f"node{number}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    node, reference = work / f"node{number}", work / "reference"
    told = {
        "leader": Agreement(mesh_ranks(cpu_mesh()), timeout=60).node_leader(),
        "node": int(number),
        "both": load(node / "both", None, reference),
        "first": load(node / "first", None, reference),
        "hub": from_hub(work, node, reference),
    }
    (work / f"rank{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
