"""What adapters are told: all that is wrong is said at the start, in one sentence."""

from __future__ import annotations

import os
from typing import Any

import pytest

from prefixd.client import Tier
from prefixd.connectors.options import attach
from prefixd.proto.errors import ConfigError


@pytest.fixture
def address(tmp_path: os.PathLike[str]) -> str:
    return f"unix:{tmp_path}/none.sock"


def test_what_is_given_counts_and_the_rest_is_usual(address: str) -> None:
    options: dict[str, Any] = {"address": address}
    client, tier = attach("engine", options, [])
    assert (tier, client.deadline_ms) == (Tier.RAM, 5_000)
    client.close()
    options |= {"tier": "Disk", "deadline_ms": 7, "max_pending_saves": 0, "salt": "s"}
    client, tier = attach("engine", options, ["salt"])
    assert (tier, client.deadline_ms, client.would_drop()) == (Tier.DISK, 7, True)
    client.close()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"tier": "nvme"}, "tier is one of ram, shm, disk, not 'nvme'"),
        ({"tier": None}, "tier is one of ram, shm, disk, not None"),
        ({"deadline_ms": 0}, "deadline_ms is a whole number of at least 1, not 0"),
        ({"deadline_ms": "5s"}, "deadline_ms is a whole number of at least 1, not '5s'"),
        ({"deadline_ms": True}, "deadline_ms is a whole number of at least 1, not True"),
        ({"max_pending_saves": -1}, "max_pending_saves is a whole number of at least 0, not -1"),
        ({"address": 7070}, "address is unix:/path or host:port, not 7070"),
        ({"teir": "shm"}, "there is no option 'teir'; there are address, deadline_ms, "),
    ],
)
def test_what_can_t_be_is_refused_with_its_name(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        attach("engine", options, ["salt"])
    assert str(refused.value).startswith(f"prefixd's options for engine: {what}")


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"tier is .*deadline_ms is .*there is no option 'x'"):
        attach("engine", {"tier": "x", "deadline_ms": 0, "x": 1}, [])


def test_options_of_the_engine_s_own_are_its_own(address: str) -> None:
    client, _ = attach("engine", {"address": address, "prefetch_threshold": 256})
    client.close()
