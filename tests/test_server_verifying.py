"""Reading entries back: right bytes, wrong bytes, and none."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from prefixd.server.verifying import head_of, read_problem

from .contract.faulty import Fault, FaultyStore
from .running import answer, in_loop, item, key, part, payload, running, stream

TIERS = pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.label)


@TIERS
@in_loop
async def test_every_kind_of_damage_is_seen(tmp_path: Path, tier: Tier) -> None:
    async with running(tmp_path, wrap={tier: FaultyStore}) as daemon:
        session = await daemon.open()
        data, ids = payload(1, 300_000), payload(2, 64)
        first = pb.SaveRequest(
            header=session.header([item(key(1), data, token_ids=ids)], tier),
            parts=[part(0, data)],
        )
        await answer(daemon.cache.Save(stream([first])))
        entry = daemon.tables.entries[key(1)]
        store = daemon.core.stores[tier]
        assert isinstance(store, FaultyStore)
        assert head_of(entry).payload_bytes == len(data)
        assert len(head_of(entry).token_ids) == len(ids)
        assert read_problem(store, entry) == ""
        for fault, words in (
            (Fault.FLIPPED_READ, "was saved"),
            (Fault.SHORT_READ, "was saved"),
            (Fault.READ_ERROR, "a failed read, on purpose"),
        ):
            store.arm(fault)
            assert words in read_problem(store, entry)
        assert read_problem(store, entry) == "", "it was the reading, not the entry"
        await daemon.assert_idle()
