"""The page cache: files out of it, files into it, and how much of them it holds."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_MINCORE_BYTES = 1 << 30  # of a file mapped at a time for mincore(2), which writes one byte a page

_libc = ctypes.CDLL(None, use_errno=True)


def evict(files: Iterable[Path]) -> float:
    """Drops files from the page cache and returns the fraction of them that stayed.

    Dirty pages cannot be dropped, hence the fsync before. Pages that some process maps stay as well, and so does all of
    it on file systems without a page cache of their own; the fraction tells.
    """
    files = list(files)
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return resident_fraction(files)


def read_into_cache(files: Iterable[Path]) -> float:
    """Reads files once, in pieces, and returns the fraction of them that is in the page cache afterwards."""
    files = list(files)
    piece = bytearray(8 << 20)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(piece):
                pass
    return resident_fraction(files)


def resident_fraction(files: Iterable[Path]) -> float:
    """Fraction of the files' pages that the page cache holds, by mincore(2); NaN where there is no such call.

    Linux tells the truth only to who owns a file or may write it; to others every page seems resident.
    """
    if sys.platform != "linux":
        return math.nan
    pages = resident = 0
    for path in files:
        size = path.stat().st_size
        with open(path, "rb") as file:
            for start in range(0, size, _MINCORE_BYTES):
                length = min(_MINCORE_BYTES, size - start)
                with mmap.mmap(file.fileno(), length, mmap.MAP_PRIVATE, offset=start) as mapped:
                    count = -(-length // mmap.PAGESIZE)
                    vector = (ctypes.c_ubyte * count)()
                    anchor = ctypes.c_char.from_buffer(mapped)
                    failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(length), vector)
                    del anchor  # the mapping cannot be closed while it is exported
                    if failed:
                        raise OSError(ctypes.get_errno(), "mincore failed", str(path))
                    pages += count
                    resident += sum(byte & 1 for byte in bytes(vector))
    return resident / pages if pages else 0.0
