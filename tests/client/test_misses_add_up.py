"""Misses by reason, through evictions, a killed daemon and its restart, for each label."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import sha256
from typing import Final
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from prefixd.client import ClaimMode, Client, SaveItem, Tier
from prefixd.client.ctl.message_json import label_in
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.lab.live_replay import LiveOptions, LiveReplay
from prefixd.client.lab.workloads import generate
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from tests.support.daemon import eventually, metrics_of, private_daemon
from tests.support.lengths import times

LABELS = ("llama", "qwen")
#: Reasons that concern a tier.
LEFT = {"evicted", "deleted", "damaged", "replaced"}
BLOCK_TOKENS = 16
WHILE_IT_IS_DOWN = 10
#: After a call that takes longer, the next ones are misses too, until the daemon is heard from.
WITHIN: Final = {"deadline_ms": 60_000}


def chain(label: str, conversation: int, blocks: int) -> list[Key]:
    parts = (f"{label} {conversation} {block}".encode() for block in range(blocks))
    return [Key(sha256(part).digest()) for part in parts]


def look(client: Client, label: str, chance: random.Random) -> None:
    """One prompt: restore its cached blocks, and save the others."""
    keys = chain(label, chance.randrange(30), chance.randrange(1, 20))
    with client.longest_run(keys, prompt_tokens=BLOCK_TOKENS * len(keys), **WITHIN) as hit:
        hit.restore_into([bytearray(4096) for _ in hit.keys])
        missing = [SaveItem(key, bytes(4096), BLOCK_TOKENS) for key in keys[len(hit) :]]
    if missing:
        client.save_many(missing, tier=chance.choice(list(Tier)), **WITHIN)


def usage(daemon: PrivateDaemon, label: str) -> pb.Usage:
    with daemon.admin() as admin:
        return admin.stats().usage[label]


@contextmanager
def clients_of(daemon: PrivateDaemon) -> Iterator[dict[str, Client]]:
    """A connected client of each label. Their last counts are reported when they leave."""
    with ExitStack() as stack:
        made = {label: Client(daemon.address, label=label) for label in LABELS}
        for client in made.values():
            # A close that takes longer than its deadline leaves without its last report.
            stack.callback(client.close, **WITHIN)
            assert client.wait_connected(**WITHIN)
        yield made


def assert_each_is_one_thing(told: pb.Usage) -> None:
    """Every look-up hits or misses, and every missed token has one reason, of one tier or none."""
    assert sum(told.misses.values()) == told.lookups - told.hits
    assert sum(each.lookups for each in told.missed) == told.lookups - told.hits
    missed = told.lookup_tokens - sum(tier.hit_tokens for tier in told.tiers)
    assert sum(each.tokens for each in told.missed) == missed
    for each in told.missed:
        assert bool(each.tier) == (label_in(each, "reason") in LEFT), each
        assert bool(each.cause) == (each.reason == pb.MISS_REASON_EVICTED), each


def assert_they_add_up(daemon: PrivateDaemon, clients: dict[str, Client], prompts: int) -> None:
    """The daemon's numbers of each label add up, and equal those of its client."""
    for label, client in clients.items():
        eventually(lambda label=label: usage(daemon, label).lookups == prompts)  # type: ignore[misc]
        told, counted = usage(daemon, label), client.counters
        assert 0 < told.hits == counted["hits"] < counted["lookups"] == prompts
        assert_each_is_one_thing(told)
        assert {why: n for why, n in counted["misses"].items() if n} == dict(told.misses)
        by_tier = {Tier(tier.tier).label: tier.hit_tokens for tier in told.tiers}
        assert {tier: n for tier, n in counted["hit_tokens_by_tier"].items() if n} == by_tier
        assert sum(by_tier.values()) == counted["hit_tokens"]


def test_the_misses_add_up_for_each_label_and_tier_through_a_restart() -> None:
    chance = random.Random(12)

    def traffic(clients: dict[str, Client], prompts: int) -> None:
        for _ in range(prompts):
            for label, client in clients.items():
                look(client, label, chance)

    with private_daemon(ram="256KiB", shm="256KiB", disk="1MiB") as daemon:
        with clients_of(daemon) as clients:
            traffic(clients, 80)
        assert_they_add_up(daemon, clients, 80)
        with daemon.admin() as admin:
            assert all(tier.evictions for tier in admin.stats().tiers)
        with clients_of(daemon) as clients:
            daemon.kill()
            for client in clients.values():
                eventually(lambda client=client: not client.connected)  # type: ignore[misc]
            traffic(clients, WHILE_IT_IS_DOWN)
            daemon.start()
            for client in clients.values():
                assert client.wait_connected(deadline_ms=60_000)
            traffic(clients, 50)
        assert_they_add_up(daemon, clients, 50 + WHILE_IT_IS_DOWN)
        for label in LABELS:
            assert usage(daemon, label).misses["unavailable"] == WHILE_IT_IS_DOWN


def scraped(text: str) -> dict[str, dict[str, float]]:
    """Of each label: tokens looked up, hit and missed, in one scrape."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        name = family.name.removeprefix("prefixd_client_")
        if name in ("lookup_tokens", "hit_tokens", "missed_tokens"):
            for sample in family.samples:
                of = found.setdefault(sample.labels["namespace"], {})
                of[name] = of.get(name, 0) + sample.value
    return found


def test_missed_tokens_add_up_at_every_scrape() -> None:
    """While clients look up, save and report, of a tier that is full and evicts."""
    chance, scrapes = random.Random(5), []
    flags = ("--server.metrics=127.0.0.1:0", "--sessions.heartbeat=100ms")
    with (
        private_daemon(*flags, ram="256KiB", shm="256KiB", disk="1MiB") as daemon,
        clients_of(daemon) as clients,
    ):
        address = f"http://{metrics_of(daemon)}/metrics"
        for _ in range(times(60, 600)):
            for label, client in clients.items():
                for _ in range(5):
                    look(client, label, chance)
            with urlopen(address) as response:
                scrapes.append(scraped(response.read().decode()))
    for of_labels in scrapes:
        for of in of_labels.values():
            assert of["lookup_tokens"] == of.get("hit_tokens", 0) + of["missed_tokens"]
    assert len({str(each) for each in scrapes}) > 1, "they changed in between"
    assert all(of["missed_tokens"] > 0 for of in scrapes[-1].values())


def test_a_live_replay_adds_up_before_and_after_a_restart() -> None:
    """With evictions in every tier; the daemon's numbers equal those of the replay."""
    each = times(60, 100)
    requests = list(generate("multi-turn", requests=2 * each, seed=12, block_tokens=512))
    with private_daemon(ram="96KiB", shm="96KiB", disk="512KiB") as daemon:
        for part in (requests[:each], requests[each:]):
            totals = LiveReplay(
                part, LiveOptions(daemon.address, workers=2, tiers=tuple(Tier))
            ).run()
            assert totals.mismatches == 0
            looked = sum(bool(request.hash_ids) for request in part)
            eventually(lambda looked=looked: usage(daemon, "default").lookups == looked)  # type: ignore[misc]
            told = usage(daemon, "default")
            assert_each_is_one_thing(told)
            assert told.lookup_tokens == totals.prompt_tokens
            assert told.restored_tokens == totals.hit_tokens > 0
            with daemon.admin() as admin:
                assert all(tier.evictions for tier in admin.stats().tiers)
            daemon.stop()
            daemon.start()


@contextmanager
def scraping(daemon: PrivateDaemon, scrapes: list[dict[str, dict[str, float]]]) -> Iterator[None]:
    """Scrape it again and again."""
    address, over = f"http://{metrics_of(daemon)}/metrics", threading.Event()

    def scrape() -> None:
        with urlopen(address) as response:
            scrapes.append(scraped(response.read().decode()))

    def loop() -> None:
        while not over.wait(0.05):
            scrape()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def scraped_to(scrapes: list[dict[str, dict[str, float]]], tokens: int) -> bool:
    return scrapes[-1].get("default", {}).get("lookup_tokens") == tokens


def test_everything_at_once_adds_up_at_every_scrape() -> None:
    """A common system prompt, evictions, a tier that is full of claims, a shared engine that is not
    there, and a daemon that is killed."""
    each = times(80, 1_000)
    requests = list(generate("chatbot", requests=2 * each, seed=9, block_tokens=512))
    assert len({request.hash_ids[0] for request in requests if request.hash_ids}) == 1
    flags = (
        *("--server.metrics=127.0.0.1:0", "--sessions.heartbeat=2s"),
        *("--shared.engine=redis://127.0.0.1:1", "--sessions.max_pinned_share=1"),
    )
    scrapes: list[dict[str, dict[str, float]]] = []
    reasons: set[str] = set()
    with private_daemon(*flags, ram="128KiB", shm="256KiB", disk="384KiB") as daemon:
        options = LiveOptions(daemon.address, workers=2, tiers=tuple(Tier))
        for part in (requests[:each], requests[each:]):
            if scrapes:
                daemon.kill()
                daemon.start()
            with (
                Client(daemon.address, label="holder") as holder,
                daemon.admin() as admin,
                scraping(daemon, scrapes),
            ):
                assert holder.wait_connected(**WITHIN)
                with holder.longest_run(chain("looked up only", 0, 3)) as nothing:
                    assert not nothing
                keys = chain("held", 0, 60)  # more than the tier takes
                items = [SaveItem(key, bytes(4096), BLOCK_TOKENS) for key in keys]
                holder.save_many(items, tier=Tier.DISK)
                with holder.claim(keys, mode=ClaimMode.ANY) as hit:
                    assert hit
                    totals = LiveReplay(part, options).run()
                    looked = sum(bool(request.hash_ids) for request in part)
                    eventually(lambda: admin.stats().usage["default"].lookups == looked)  # noqa: B023
                    told = admin.stats().usage["default"]
                    assert_each_is_one_thing(told)
                    assert told.lookup_tokens == totals.prompt_tokens
                    assert told.restored_tokens == totals.hit_tokens > 0
                    assert totals.saves["no_room"] > 0, totals.saves
                    eventually(partial(scraped_to, scrapes, totals.prompt_tokens))
            with daemon.admin() as admin:  # the holder has left, with its last counts
                eventually(lambda: admin.stats().usage["holder"].lookups)
                both = admin.stats().usage.values()
                reasons |= {label_in(each, "reason") for usage in both for each in usage.missed}
    assert {"never_saved", "evicted", "before_start"} <= reasons
    for of_labels in scrapes:
        for of in of_labels.values():
            assert of.get("lookup_tokens", 0) == of.get("hit_tokens", 0) + of.get(
                "missed_tokens", 0
            )
    assert len({str(each) for each in scrapes}) > 1, "they changed in between"
