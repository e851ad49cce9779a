"""Fixtures that all tests share."""

from __future__ import annotations

import os

# Before torch and the libraries are imported: tests reach no network and leave the other cores to the ranks they start.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")  # else a product's last bits depend on how its operands lie in memory

from collections.abc import Iterator

import pytest
import torch

from .ranks import Ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.accelerator.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no accelerator"))


@pytest.fixture(scope="session")
def ranks1() -> Iterator[Ranks]:
    """One rank in a process group of its own; like the others it starts at its first call."""
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def ranks2() -> Iterator[Ranks]:
    """Two ranks, shared by all tests."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    """Four ranks, shared by all tests."""
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def ranks_of(ranks1: Ranks, ranks2: Ranks, ranks4: Ranks) -> dict[int, Ranks]:
    """The shared pools by world size, for tests parametrised over it."""
    return {1: ranks1, 2: ranks2, 4: ranks4}
