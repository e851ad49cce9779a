"""Save a component: from shards to the folder that `save_pretrained` would have written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from metashard.errors import SaveError
from metashard.policy import SavePolicy
from metashard.save.report import SaveReport
from metashard.save.run import SaveRun
from metashard.save.twin import ADAPTERS, Twin, check_real
from metashard.strategy import as_dtype
from metashard.weight_files import STEMS, VARIANT, is_weights

_SIZE = re.compile(r"(?=.*[1-9])\d+(\.\d+)? *[KMGT]B", re.IGNORECASE)  # what the libraries read


def save_component(
    module: nn.Module,
    folder: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    variant: str | None = None,
    lora: str = "leave_out",
    overwrite: bool = False,
    save: SavePolicy = SavePolicy(),
) -> SaveReport:
    """Write a folder for `from_pretrained` out of FSDP2 shards; call it on every rank that holds some.

    The folder is what the library's own `save_pretrained` writes in a single process: the same files, index and config,
    and the same bytes in every tensor. Each rank writes its own byte runs into the files, and nothing is gathered.
    What a rank holds that does not see the folder travels to rank 0. The folder is complete or as it was before: see
    [Note: taking the place] in `metashard.save.commit`.

    Args:
        module: A diffusers or transformers model, sharded or not, maybe with adapters, maybe in a `PeftModel`. A plain
            tensor has to be the same on all ranks.
        folder: A new or empty folder on rank 0.
        max_shard_size: The largest weight file, in bytes or such as "5GB"; larger models get an index.
        dtype: Save floating tensors in this dtype, as a model has them that was loaded so by `from_pretrained`: the
            class's fp32 pins stay fp32. None saves every tensor in its own.
        variant: Weight variant, such as "fp16".
        lora: "leave_out" saves the base as it was without adapters; "merge" saves it with those merged that are active.
            Of tied layers one may have an adapter, and both get it then, as by `merge_and_unload`; two are refused.
        overwrite: Whether `folder` may hold something. The model's files of this variant are replaced, all else stays.
        save: How the bytes go out.

    Returns:
        What was done: files, seconds, bytes of each rank.

    Memory:
        `save.staging_bytes` on each rank, twice that on one that sends or receives. With `lora="merge"` the largest
        adapted layer too.

    Raises:
        SaveError: On every rank, naming rank, phase, file and key; the folder is as it was.
    """
    run = SaveRun(module, folder, overwrite, save)
    with run.going_on():
        asked = (run.folder.name, str(max_shard_size), dtype, variant, lora, overwrite)
        run.agreement.same(asked, what="arguments", phase="resolve")
        with run.phase("resolve"):
            if lora not in ADAPTERS:
                raise SaveError(f"lora={lora!r}: expected one of {', '.join(ADAPTERS)}.", phase="resolve")
            if variant is not None and not (isinstance(variant, str) and VARIANT.fullmatch(variant)):
                raise SaveError(f"variant={variant!r}: expected a part of a file name, such as fp16.", phase="resolve")
            _check_size(max_shard_size)
            check_real(module)
            twin = Twin(module, dtype=as_dtype(dtype), lora=lora)
        run.agreement.same(list(twin.facts()), what="the tensors that they hold", phase="agree")
        root: Any = twin.root
        stem = STEMS["diffusers" if hasattr(root, "save_config") else "transformers"][0]
        return run.write(
            lambda path: root.save_pretrained(str(path), max_shard_size=max_shard_size, variant=variant),
            twin.sources,
            twin=twin,
            stale=lambda name: is_weights(name, stem, variant),
        )


def _check_size(size: Any) -> None:
    """Refuse what the libraries would take for no limit (NaN), or for a file a tensor (0, -5)."""
    if not (_SIZE.fullmatch(size) if isinstance(size, str) else type(size) is int and size > 0):
        raise SaveError(
            f'max_shard_size={size!r}: expected a number of bytes from 1 on, or such as "5GB".',
            phase="resolve",
            expected='bytes, or such as "5GB"',
            got=repr(size),
        )
