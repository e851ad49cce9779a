#!/usr/bin/env python3
"""Evicts files from the page cache and verifies it, so that the next load reads them from storage.

    python tools/evict_page_cache.py MODEL
    python tools/evict_page_cache.py MODEL/transformer/*.safetensors

Each PATH is a file or a folder, of which all files below it are taken. Needs no root: the kernel is asked file by file
(posix_fadvise DONTNEED) once what has not been written yet is on disk, and then asked what it still holds (mincore).
Prints for each PATH its size, the fraction that was in the cache before and the fraction that is left.

Exit code: 0; 1 if more than 1 % of a PATH is left (a process uses the files, or the file system is all memory); 2 for
bad input: no such path, nothing in it, or no permission to evict, with one line that says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from page import evict, resident_fraction
from preflight import EVICTED, UsageError, check_evictable, command_line, size


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="file or folder")
    args = parser.parse_args(argv)
    return command_line("evict_page_cache", lambda: evict_all(args.paths))


def evict_all(paths: Sequence[Path]) -> int:
    """Evicts, prints a line for each path, and returns the exit code.

    Raises:
        UsageError: Before anything is evicted.
    """
    files = {path: _files(path) for path in paths}
    for inside in files.values():
        check_evictable(inside)
    code = 0
    for path, inside in files.items():
        before, left = resident_fraction(inside), evict(inside)
        total = sum(file.stat().st_size for file in inside)
        print(f"{path}: {size(total)} in {len(inside)} file(s), {before:.1%} cached before, {left:.1%} left")
        code |= left > EVICTED
    return int(code)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    found = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    if not any(file.stat().st_size for file in found):
        raise UsageError(f"{path}: no files with anything in them")
    return found


if __name__ == "__main__":
    sys.exit(main())
