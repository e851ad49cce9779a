"""Strategy `stream`: a leader reads the files entry by entry, straight into the buckets that it sends.

The leader is rank 0, or the first rank of each host that sees the files where every host has one (`crew_of`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from metashard.checkpoint import Entry
from metashard.fill.collective import Parcel
from metashard.fill.reader import Read, Reader, reads_for
from metashard.fill.target import Target


class FileSource:
    """Source over weight files; holds no tensor.

    Args:
        reader: Reads what a bucket needs, by several threads.
        entries: Target name -> its entry.
    """

    def __init__(self, reader: Reader, entries: Mapping[str, Entry]) -> None:
        self.reader, self.entries = reader, entries

    def pack(self, parcels: Sequence[Parcel]) -> None:
        reads: list[Read] = []
        for target, runs, out in parcels:
            reads += reads_for(self.entries[target.fqn], runs, out, most=self.reader.most)
        self.reader.run(reads)

    def done(self, target: Target) -> None:
        """Nothing is kept."""
