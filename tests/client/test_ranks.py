"""A namespace without a shard is refused in a process that says that it is one of several ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from prefixd.client.chains import BlockChain, prefix_walk
from prefixd.client.ranks import Rank, _launched, rank_here
from prefixd.proto.errors import InvalidNamespace
from prefixd.proto.keys import Namespace

NAMESPACE = Namespace(b"f" * 32, "q", b"c" * 32)
VARIABLES = ("WORLD_SIZE", "RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    _launched.cache_clear()
    yield
    _launched.cache_clear()


def torch_says(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    module = ModuleType("torch.distributed")
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, "torch.distributed", module)


def group(rank: int, size: int) -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "get_world_size": lambda: size,
        "get_rank": lambda: rank,
    }


def test_a_process_of_its_own() -> None:
    assert rank_here() is None
    assert len(BlockChain(NAMESPACE, [1, 2], 1)) == 2


def test_a_rank_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_says(monkeypatch, **group(1, 4))
    assert rank_here() == Rank("1", 4, "torch.distributed")
    with pytest.raises(InvalidNamespace, match=r"rank 1 of 4 \(torch.distributed\).*'tp 1/4'"):
        BlockChain(NAMESPACE, [1, 2], 1)
    with pytest.raises(InvalidNamespace, match="shard='whole'"):
        prefix_walk(NAMESPACE, [1, 2], 1)
    for shard in ("tp 1/4", "whole"):
        assert len(BlockChain(replace(NAMESPACE, shard=shard), [1, 2], 1)) == 2
        assert len(prefix_walk(replace(NAMESPACE, shard=shard), [1, 2], 1).keys) == 2


@pytest.mark.parametrize(("size_name", "rank_name"), [VARIABLES[:2], VARIABLES[2:]])
def test_a_rank_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, size_name: str, rank_name: str
) -> None:
    monkeypatch.setenv(size_name, "2")
    assert rank_here() is None, "the size of a job, of which this process may be none"
    _launched.cache_clear()
    monkeypatch.setenv(rank_name, "0")
    with pytest.raises(InvalidNamespace, match="rank 0 of 2"):
        BlockChain(NAMESPACE, [1, 2], 1)


@pytest.mark.parametrize("size", ["1", "0", "", "-2", "two", "²", "1 "])
def test_variables_that_say_nothing(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", "0")
    assert rank_here() is None


def test_torch_knows_better_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    assert rank_here() == Rank("3", 8, "$WORLD_SIZE and $RANK")
    torch_says(monkeypatch, **group(0, 1))
    assert rank_here() is None
    torch_says(monkeypatch, **group(3, 8) | {"is_initialized": lambda: False})
    assert rank_here() == Rank("3", 8, "$WORLD_SIZE and $RANK")


def test_an_unknown_torch_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for odd in (SimpleNamespace(), SimpleNamespace(is_available=lambda: 1 / 0)):
        monkeypatch.setitem(sys.modules, "torch.distributed", odd)
        assert rank_here() is None


def test_two_ranks_share_nothing() -> None:
    """The same tokens, bytes of the same size, and a checksum that fits: only the key differs."""
    ranks = [BlockChain(replace(NAMESPACE, shard=f"tp {rank}/2"), [1, 2], 1) for rank in (0, 1)]
    assert set(ranks[0].keys).isdisjoint(ranks[1].keys)
