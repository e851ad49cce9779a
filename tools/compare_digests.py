#!/usr/bin/env python3
"""Compares the shards of two runs by the digests in their results files.

    python benchmarks/init_latency.py ... --json A.json
    python benchmarks/init_latency.py ... --json B.json
    python tools/compare_digests.py A.json B.json

A results file is a JSON object with `"digests": {FLOW: {RANKS: [sha256 of rank 0, of rank 1, ...]}}`. Flows and numbers
of ranks that both files have are compared flow by flow; with --across every flow is held against every other one of the
same number of ranks as well, in both files: different ways to load the same weights must end with the same shards.

Exit code: 0 if all that was compared is equal; 1 if something differs; 2 for bad input: not such a file, or two files
that have no flow and number of ranks in common, with one line that says why.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from preflight import UsageError, command_line

SHA256 = re.compile(r"[0-9a-f]{64}")
Digests = dict[tuple[str, int], list[str]]  # (flow, ranks) -> sha256 by rank


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("a", type=Path, metavar="A.json", help="results file of one run")
    parser.add_argument("b", type=Path, metavar="B.json", help="results file of another one")
    parser.add_argument("--across", action="store_true", help="also hold every flow against every other one")
    args = parser.parse_args(argv)
    return command_line("compare_digests", lambda: compare(args.a, args.b, across=args.across))


def compare(a: Path, b: Path, *, across: bool = False) -> int:
    """Prints a line for each comparison and returns the exit code."""
    left, right = read_digests(a), read_digests(b)
    pairs = list(_pairs(left, right, across=across))
    if not pairs:
        raise UsageError(f"nothing to compare: {a} has {_has(left)}, {b} has {_has(right)}")
    code = 0
    for what, ours, theirs in pairs:
        differs = [str(rank) for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other]
        print(f"{what}: {'DIFFERS on rank(s) ' + ', '.join(differs) if differs else 'equal'}")
        code |= bool(differs)
    return int(code)


def _pairs(left: Digests, right: Digests, *, across: bool) -> Iterator[tuple[str, list[str], list[str]]]:
    for flow, ranks in left:
        if (flow, ranks) in right:
            yield f"{flow}, {ranks} rank(s)", left[flow, ranks], right[flow, ranks]
    if across:
        everything = [(f"A's {f}", n, d) for (f, n), d in left.items()]
        everything += [(f"B's {f}", n, d) for (f, n), d in right.items() if (f, n) not in left]
        for number, (flow, ranks, digests) in enumerate(everything):
            other = next((item for item in everything[:number] if item[1] == ranks), None)
            if other is not None:  # being equal carries over: one of the others is enough
                yield f"{flow} and {other[0]}, {ranks} rank(s)", digests, other[2]


def _has(digests: Digests) -> str:
    return ", ".join(f"{flow} on {ranks} rank(s)" for flow, ranks in digests) or "no flow"


def read_digests(path: Path) -> Digests:
    """The digests of a results file.

    Raises:
        UsageError: It cannot be read, is no JSON, or has no well-formed digests.
    """
    try:
        document: Any = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    told = document.get("digests") if isinstance(document, dict) else None
    if not isinstance(told, dict):
        raise UsageError(f"{path} has no `digests`: expected the results file of benchmarks/init_latency.py")
    found: Digests = {}
    for flow, by_ranks in told.items():
        for ranks, digests in by_ranks.items() if isinstance(by_ranks, dict) else [("?", None)]:
            well_formed = isinstance(digests, list) and all(isinstance(d, str) and SHA256.fullmatch(d) for d in digests)
            if not (well_formed and ranks.isdigit() and len(digests) == int(ranks)):
                raise UsageError(f"{path}: digests of {flow}, {ranks} rank(s): expected a list of one sha256 a rank")
            found[flow, int(ranks)] = digests
    return found


if __name__ == "__main__":
    sys.exit(main())
