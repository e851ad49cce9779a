"""A quick part of the fault matrix: every phase, every kind of fault, every strategy and transport."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.ranks import Ranks
from tools.fault_matrix import Matrix, judge, save_checkpoint
from tools.fault_points import KINDS, LAST, POINTS, WAYS, WORLD, Cell, all_cells

CELLS = [
    Cell("resolve", 0, "direct", "exception"),
    Cell("headers", 0, "stream/scatter", "wrong"),
    Cell("import", LAST, "direct", "exception"),
    Cell("build", LAST, "direct", "wrong"),
    Cell("weights", 0, "rank0/scatter", "slow"),
    Cell("plan", 0, "direct", "exception"),
    Cell("sources", LAST, "stream/scatter", "exception"),
    Cell("hook", 0, "rank0/broadcast", "wrong"),
    Cell("adapter", LAST, "direct", "exception"),
    Cell("adapters", 0, "direct", "exception"),
    Cell("agree", LAST, "direct", "wrong"),
    Cell("dtypes", 0, "direct", "exception"),
    Cell("shard", LAST, "direct", "wrong"),
    Cell("wrap", 0, "direct", "exception"),
    Cell("allocate", LAST, "rank0/broadcast", "exception"),
    Cell("read", LAST, "direct", "wrong"),
    Cell("read for others", 0, "stream/broadcast", "slow"),
    Cell("pack", 0, "rank0/scatter", "exception"),
    Cell("unpack", LAST, "stream/broadcast", "exception"),
    Cell("computed", LAST, "direct", "exception"),
    Cell("check", LAST, "stream/scatter", "wrong"),
    # From here on the process group is lost with the load.
    Cell("buffers", 0, "direct", "exception"),
    Cell("send", 0, "stream/scatter", "killed"),
    Cell("receive", LAST, "rank0/broadcast", "killed"),
    Cell("share", LAST, "direct", "killed"),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder)
    with Ranks(WORLD) as ranks:
        yield Matrix(ranks, folder, tmp_path_factory.mktemp("scratch"))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_all_ranks_fail_alike_or_not_at_all(matrix: Matrix, cell: Cell) -> None:
    how, found, _ = matrix.run(cell)
    assert (how, found) == ("ok", [])


def test_these_cells_are_of_the_table_and_cover_it() -> None:
    existing = {cell for cell, exists in all_cells() if exists}
    assert set(CELLS) <= existing
    assert {cell.point for cell in CELLS} == set(POINTS)
    assert {cell.way for cell in CELLS} == set(WAYS)
    counts = Counter(cell.kind for cell in CELLS)
    assert all(counts[kind] >= 2 for kind in KINDS)


def test_the_judge_of_a_cell_can_say_no(matrix: Matrix) -> None:
    cell = CELLS[0]
    healthy = Cell(cell.point, LAST, cell.way, cell.kind)  # nobody comes there on that rank: a good load
    assert matrix.run(healthy)[0] == "wrong"
    assert judge(cell, [ValueError("no")] * WORLD, 0.0, matrix.digests)
