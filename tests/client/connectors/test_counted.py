"""The tokens hit that a daemon shows for an engine are those that its own harness would count."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import pytest

from prefixd.client import Client, SaveItem, Tier
from prefixd.client.connectors.lmcache import L2Core
from prefixd.client.connectors.sglang import Pages
from prefixd.client.connectors.vllm import TierCore
from prefixd.client.ctl.message_json import label_in
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import ForeignNamespace, Key
from tests.support.daemon import eventually, private_daemon

CHUNK_TOKENS, SIZE = 64, 500
#: Chunks of a prompt, and prompts.
CHUNKS, PROMPTS = 10, 10
_numbers = count()


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon() as made:
        yield made


class Engine(NamedTuple):
    client: Client
    label: str
    space: ForeignNamespace

    def save(self, hashes: list[bytes]) -> None:
        items = [SaveItem(key, bytes(SIZE), CHUNK_TOKENS) for key in self.keys(hashes)]
        assert all(each.ok for each in self.client.save_many(items, tier=Tier.SHM))

    def keys(self, hashes: list[bytes]) -> list[Key]:
        return [self.space.key(each) for each in hashes]

    def told(self, daemon: PrivateDaemon) -> pb.Usage:
        """What the daemon shows of this engine, when all of it was reported."""
        lookups = self.client.counters["lookups"]
        self.client.close()
        with daemon.admin() as admin:
            eventually(lambda: admin.stats().usage[self.label].lookups == lookups)
            return admin.stats().usage[self.label]


@pytest.fixture(params=[True, False], ids=["in place", "by calls"])
def engine(daemon: PrivateDaemon, request: pytest.FixtureRequest) -> Iterator[Engine]:
    label = f"engine-{next(_numbers)}"
    space = ForeignNamespace("engine", {"model": label})
    with Client(daemon.address, label=label, local=request.param) as client:
        assert client.wait_connected(deadline_ms=60_000)
        client.exists_one(space.key(b"none"), counted=False)
        assert client.in_place == request.param
        yield Engine(client, label, space)


def prompts() -> list[list[bytes]]:
    return [
        [number.to_bytes(32, "big") for number in range(first, first + CHUNKS)]
        for first in range(0, PROMPTS * CHUNKS, CHUNKS)
    ]


def there(per_prompt: int) -> list[bytes]:
    """Ten chunks: all of the first prompt, or the first of each."""
    if per_prompt == CHUNKS:
        return prompts()[0]
    return [prompt[0] for prompt in prompts()]


def assert_a_tenth_hit(told: pb.Usage) -> None:
    hit = sum(tier.hit_tokens for tier in told.tiers)
    assert told.lookup_tokens == PROMPTS * CHUNKS * CHUNK_TOKENS
    assert hit == told.lookup_tokens // 10
    assert {label_in(each, "reason"): each.tokens for each in told.missed} == {
        "never_saved": told.lookup_tokens - hit
    }


@pytest.mark.parametrize("per_prompt", [1, CHUNKS])
def test_sglang(daemon: PrivateDaemon, engine: Engine, per_prompt: int) -> None:
    pages = Pages(engine.client, engine.space, Tier.SHM, CHUNK_TOKENS)
    engine.save(there(per_prompt))
    for prompt in prompts():
        hashes = [each.hex() for each in prompt]
        run = pages.leading_run(hashes)
        if run:
            assert all(pages.get(hashes[:run], [[memoryview(bytearray(SIZE))]] * run))
    assert_a_tenth_hit(engine.told(daemon))


@pytest.mark.parametrize("per_prompt", [1, CHUNKS])
def test_vllm(daemon: PrivateDaemon, engine: Engine, per_prompt: int) -> None:
    rows = memoryview(bytearray(SIZE * CHUNKS)).cast("B", (CHUNKS, SIZE))
    tier = TierCore(engine.client, engine.space, rows, Tier.SHM, CHUNK_TOKENS)
    engine.save(there(per_prompt))
    for job, prompt in enumerate(prompts()):
        for each in prompt:
            eventually(lambda each=each: tier.look_up(each) is not None)  # type: ignore[misc]
        found = [each for each in prompt if each in there(per_prompt)]
        if found:
            tier.load(job, found, range(len(found)))
    tier.drain()
    assert all(ended.ok for ended in tier.finished())
    assert_a_tenth_hit(engine.told(daemon))


@pytest.mark.parametrize("per_prompt", [1, CHUNKS])
def test_lmcache(daemon: PrivateDaemon, engine: Engine, per_prompt: int) -> None:
    core = L2Core(engine.client, Tier.SHM, CHUNK_TOKENS)
    engine.save(there(per_prompt))
    for prompt in prompts():
        keys = engine.keys(prompt)
        number = core.look_up(keys)
        found = eventually(lambda number=number: core.found(number))  # type: ignore[misc]
        locked = [key for key, present in zip(keys, found, strict=True) if present]
        if locked:
            load = core.load(locked, [bytearray(SIZE) for _ in locked])
            assert all(eventually(lambda load=load: core.loaded(load)))  # type: ignore[misc]
        core.unlock(locked)
    assert_a_tenth_hit(engine.told(daemon))


def test_without_the_size_of_chunks_there_is_no_ratio(
    daemon: PrivateDaemon, engine: Engine
) -> None:
    core = L2Core(engine.client, Tier.SHM)
    engine.save(there(CHUNKS))
    for prompt in prompts():
        number = core.look_up(engine.keys(prompt))
        eventually(lambda number=number: core.found(number))  # type: ignore[misc]
    told = engine.told(daemon)
    assert (told.lookups, told.hits, told.lookup_tokens) == (PROMPTS, 1, 0)
    assert sum(each.lookups for each in told.missed) == PROMPTS - 1
