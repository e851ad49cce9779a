"""Boxes, runs and buckets against `torch.chunk` and plain indexing: what is planned is what torch would cut."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metashard.plan import Box, Bucket, Sharding, chunk, fill_buckets, flat_part, whole

EXAMPLES = settings(max_examples=120, deadline=None)
ALIGN = 16

shapes = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor in which every element is its own place in the flattened tensor."""
    return torch.arange(math.prod(shape)).reshape(shape)


def torch_chunk(tensor: torch.Tensor, index: int, parts: int, dim: int) -> torch.Tensor:
    """Chunk `index` as FSDP and DTensor take it: torch's, or an empty one where torch gives fewer."""
    pieces = tensor.chunk(parts, dim)
    return pieces[index] if index < len(pieces) else tensor.narrow(dim, tensor.shape[dim], 0)


def cut(tensor: torch.Tensor, sharding: Sharding, mesh: tuple[int, ...], at: tuple[int, ...]) -> torch.Tensor:
    for axis, dim in sharding.axes:
        tensor = torch_chunk(tensor, at[axis], mesh[axis], dim)
    return tensor


def coordinates(mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(size) for size in mesh)))


def gathered(box: Box, start: int = 0, stop: int | None = None) -> list[int]:
    """The places of the local elements [start, stop), in local order, as `runs` tells them."""
    held: dict[int, int] = {}
    for first, local, count in box.runs(start, stop):
        assert count > 0
        for step in range(count):
            assert local + step not in held
            held[local + step] = first + step
    return [held[local] for local in sorted(held)]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], Sharding, tuple[int, ...]]:
    """A shape, a mesh and a sharding of it: each mesh axis holds replicas or cuts some dim, in any order."""
    shape, mesh = draw(shapes), draw(meshes)
    axes = []
    for axis in draw(st.permutations(range(len(mesh)))):
        dim = draw(st.one_of(st.none(), st.integers(0, len(shape) - 1)))
        if dim is not None:
            axes.append((axis, dim))
    return shape, Sharding(tuple(axes)), mesh


@EXAMPLES
@given(layouts())
@example(((5, 3), Sharding(((0, 0),)), (4,)))  # FSDP, the last rank holds nothing
@example(((5, 3), Sharding(((1, 0),)), (2, 4)))  # HSDP
@example(((5, 3), Sharding(((1, 0), (0, 0))), (2, 2)))  # FSDP over tensor parallel, both cut dim 0
@example(((4, 5, 3), Sharding(((0, 1),)), (2,)))  # Shard(1)
@example(((4, 5, 3), Sharding(((1, 1), (0, 0))), (2, 2)))  # FSDP over a row-parallel weight
@example(((0, 3), Sharding(((0, 0),)), (2,)))
def test_runs_are_the_elements_that_torch_chunk_gives(layout: tuple) -> None:
    shape, sharding, mesh = layout
    full = numbered(shape)
    for at in coordinates(mesh):
        box, part = sharding.box(shape, mesh, at), cut(full, sharding, mesh, at)
        assert box.full == shape
        assert box.shape == tuple(part.shape)
        assert box.numel == part.numel()
        assert gathered(box) == part.flatten().tolist()


@EXAMPLES
@given(layouts())
def test_each_element_is_held_once_in_every_replica(layout: tuple) -> None:
    shape, sharding, mesh = layout
    cutting = [axis for axis, _ in sharding.axes]
    replicas: dict[tuple[int, ...], list[int]] = {}
    for at in coordinates(mesh):
        replica = tuple(c for axis, c in enumerate(at) if axis not in cutting)
        replicas.setdefault(replica, []).extend(gathered(sharding.box(shape, mesh, at)))
    for held in replicas.values():
        assert sorted(held) == list(range(math.prod(shape)))


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("world", [2, 4])
def test_few_rows_are_one_run_a_rank_and_none_for_an_empty_shard(rows: int, world: int) -> None:
    full = numbered((rows, 6))
    for rank in range(world):
        box = Sharding(((0, 0),)).box((rows, 6), (world,), (rank,))
        part = torch_chunk(full, rank, world, 0)
        assert list(box.runs()) == ([(int(part[0, 0]), 0, part.numel())] if part.numel() else [])
        if not part.numel():
            assert (box.numel, box.run_length, box.shape) == (0, 0, (0, 6))
            assert list(box.overlap(0, full.numel())) == []


def test_shard_1_is_one_run_a_row_block() -> None:
    box = Sharding(((0, 1),)).box((2, 5, 3), (2,), (1,))
    assert box.run_length == 2 * 3
    assert list(box.runs()) == [(9, 0, 6), (24, 6, 6)]


@EXAMPLES
@given(layouts(), st.data())
def test_a_range_of_runs_is_that_range_of_the_shard(layout: tuple, data: st.DataObject) -> None:
    shape, sharding, mesh = layout
    at = data.draw(st.sampled_from(coordinates(mesh)))
    box = sharding.box(shape, mesh, at)
    start = data.draw(st.integers(0, box.numel))
    stop = data.draw(st.integers(start, box.numel + 3))
    local = cut(numbered(shape), sharding, mesh, at).flatten().tolist()
    assert gathered(box, start, stop) == local[start:stop]


@EXAMPLES
@given(layouts(), st.data())
def test_overlap_is_what_the_box_holds_of_a_range_of_the_full_tensor(layout: tuple, data: st.DataObject) -> None:
    shape, sharding, mesh = layout
    at = data.draw(st.sampled_from(coordinates(mesh)))
    box = sharding.box(shape, mesh, at)
    start = data.draw(st.integers(0, math.prod(shape)))
    stop = data.draw(st.integers(start + 1, math.prod(shape) + 3))
    local = cut(numbered(shape), sharding, mesh, at).flatten().tolist()
    expected = {place: index for index, place in enumerate(local) if start <= place < stop}
    got: dict[int, int] = {}
    for first, index, count in box.overlap(start, stop):
        assert count > 0
        for step in range(count):
            assert first + step not in got
            got[first + step] = index + step
    assert got == expected


def test_an_empty_range_overlaps_nothing() -> None:
    assert list(whole((4,)).overlap(2, 2)) == []


def test_a_scalar_and_a_replicated_tensor_are_one_run() -> None:
    assert list(whole(()).runs()) == [(0, 0, 1)]
    assert list(whole((2, 3)).runs()) == [(0, 0, 6)]
    assert Sharding().box((2, 3), (4,), (2,)) == whole((2, 3))


@EXAMPLES
@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_those_of_torch(size: int, parts: int) -> None:
    full = numbered((size,))
    for index in range(parts):
        start, stop = chunk(size, index, parts)
        assert full[start:stop].tolist() == torch_chunk(full, index, parts, 0).tolist()
    assert [flat_part((size, 1), i, parts) for i in range(parts)] == [chunk(size, i, parts) for i in range(parts)]


sizes = st.lists(
    st.tuples(st.one_of(st.integers(0, 9), st.integers(0, 3000)), st.sampled_from([1, 2, 4, 8, 16])), max_size=12
)
bounds = st.integers(1, 64).map(lambda n: n * ALIGN)


@EXAMPLES
@given(sizes, bounds)
@example([(1, 4)] * 50 + [(5000, 2)] + [(0, 4)] + [(1, 16)] * 3, 256)  # tiny ones around a huge one
@example([], 64)
def test_buckets_hold_every_element_once_and_in_order(tensors: list[tuple[int, int]], bound: int) -> None:
    reached = [0] * len(tensors)
    items: list[int] = []
    for bucket in fill_buckets(tensors, bound):
        assert bucket.pieces
        for piece in bucket.pieces:
            assert piece.start == reached[piece.item] < piece.stop
            reached[piece.item] = piece.stop
            items.append(piece.item)
    assert reached == [numel for numel, _ in tensors]
    assert items == sorted(items)


@EXAMPLES
@given(sizes, bounds)
def test_pieces_are_aligned_apart_and_inside_their_bucket(tensors: list[tuple[int, int]], bound: int) -> None:
    for bucket in fill_buckets(tensors, bound):
        end = 0
        for piece in bucket.pieces:
            assert piece.at % ALIGN == 0
            assert piece.at >= end
            end = piece.at + (piece.stop - piece.start) * tensors[piece.item][1]
        assert end <= bucket.nbytes <= bound
        assert bucket.nbytes % ALIGN == 0


@EXAMPLES
@given(sizes, st.integers(16, 1000))
@example([(21, 1), (3, 16)], 21)
def test_a_bucket_is_never_larger_than_its_bound(tensors: list[tuple[int, int]], bound: int) -> None:
    """Also where the bound is no multiple of the alignment, as staging_bytes // 2 // 3 ranks is not."""
    assert max((bucket.nbytes for bucket in fill_buckets(tensors, bound)), default=0) <= bound


def test_small_tensors_share_a_bucket_and_a_large_one_spans_several() -> None:
    small = fill_buckets([(4, 4)] * 10, 1024)
    assert [len(bucket.pieces) for bucket in small] == [10]
    large = fill_buckets([(1000, 4)], 1024)
    assert [(b.pieces[0].start, b.pieces[0].stop, b.nbytes) for b in large] == [
        (0, 256, 1024),
        (256, 512, 1024),
        (512, 768, 1024),
        (768, 1000, 928),
    ]
    assert isinstance(large[0], Bucket)
