"""Turns of threads: a slow peer occupies no thread for long."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from prefixd.proto.vocabulary import Tier
from prefixd.server.api import data_transfers
from prefixd.server.api.data_transfers import Receiving


class Dripping:
    """A socket on which a byte comes shortly before each wait for it would end."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.taken_bytes = 0
        self._there = False

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, within_ms: int) -> bool:
        self.now_s += 0.9 * within_ms / 1e3
        self._there = True
        return True

    def receive(self, _buffers: Sequence[memoryview]) -> int:
        if not self._there:
            raise BlockingIOError
        self._there = False
        self.taken_bytes += 1
        return 1


def test_a_byte_each_millisecond_does_not_keep_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = Dripping()
    monkeypatch.setattr(data_transfers, "time", stream)
    # Bytes for a write that has ended are thrown away.
    write: Any = SimpleNamespace(
        entry=SimpleNamespace(payload_bytes=2**20, tier=Tier.RAM), problem="ended", stopping=True
    )
    receiving = Receiving(stream, [write])
    receiving.aim()
    assert receiving.take() is None
    assert receiving.starved
    assert 10 < stream.taken_bytes < 20
    assert receiving.take_waited_s() == pytest.approx(stream.now_s)
    assert receiving.take_waited_s() == 0
