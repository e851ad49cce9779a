"""What one save did."""

from __future__ import annotations

from dataclasses import dataclass

from metashard.report import RankReport, size_text


@dataclass(frozen=True)
class SaveReport:
    """What one save did, the same on every rank. `str()` prints a few lines.

    Args:
        folder: Where the checkpoint is, as rank 0 sees it.
        files: Weight file -> its size in bytes.
        phases: Seconds of each phase, the slowest rank's.
        ranks: One entry a rank: bytes sent and received, memory peaks.
        written: Bytes of tensors that each rank has written. Their sum is that of the files, without headers.
    """

    folder: str
    files: dict[str, int]
    phases: dict[str, float]
    ranks: tuple[RankReport, ...]
    written: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of all weight files."""
        return sum(self.files.values())

    @property
    def seconds(self) -> float:
        """Sum of the phases."""
        return sum(self.phases.values())

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.phases.items())
        what = f"{size_text(self.nbytes)} in {len(self.files)} files to {self.folder}"
        lines = [f"metashard: saved {what} in {self.seconds:.2f} s ({phases})"]
        lines.append("  rank    written       sent  peak host")
        for rank, (entry, written) in enumerate(zip(self.ranks, self.written, strict=True)):
            figures = (written, entry.bytes_sent, entry.peak_host_bytes)
            lines.append(f"  {rank:<4} " + " ".join(f"{size_text(value):>10}" for value in figures))
        return "\n".join(lines)
