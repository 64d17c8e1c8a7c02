"""SGLang itself: its HiCache controller, its host pool and its backend factory, unmodified.
`make engines-sglang` runs this file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prefixd.client.ctl.private import PrivateDaemon
from tests.engines.sglang_hicache import (
    LAYOUTS,
    backup,
    controller,
    fresh_hashes,
    host_pool,
    prefetch,
    prefixd_extra,
    without_torchvision,
)
from tests.support.daemon import private_daemon

pytest.importorskip("sglang")
torch = pytest.importorskip("torch")
# The engine's own warnings are not errors here.
pytestmark = pytest.mark.filterwarnings("default")

PAGES, PAGE_TOKENS, LAYERS = 8, 16, 3


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    without_torchvision()


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon(ram="64MiB", shm="64MiB", disk="64MiB") as daemon:
        yield daemon


@pytest.mark.parametrize("tier", ["ram", "shm", "disk"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_through_its_controller(
    daemon: PrivateDaemon, layout: str, tier: str
) -> None:
    pool = host_pool(layout, pages=PAGES, page_tokens=PAGE_TOKENS, layers=LAYERS)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    saved = [pool.get_data_page(page * PAGE_TOKENS).clone() for page in range(PAGES)]
    made = controller(pool, "dynamic", prefixd_extra(daemon.address, tier))
    hashes, indices = fresh_hashes(PAGES), torch.arange(PAGES * PAGE_TOKENS)
    try:
        # Pages 0 to 3, and page 6 after a gap.
        assert backup(made, hashes[:4], indices[: 4 * PAGE_TOKENS]) == 4 * PAGE_TOKENS
        six = indices[6 * PAGE_TOKENS : 7 * PAGE_TOKENS]
        assert backup(made, hashes[6:7], six) == PAGE_TOKENS
        assert made.storage_backend.batch_exists(hashes) == 4
        pool.kv_buffer.zero_()
        # Into other slots than the pages came from.
        assert prefetch(made, hashes, indices.flip(0).view(PAGES, -1).flip(1).flatten()) == 4
        for page in range(PAGES):
            place = (PAGES - 1 - page) * PAGE_TOKENS
            expected = saved[page] if page < 4 else torch.zeros_like(saved[page])
            assert torch.equal(pool.get_data_page(place), expected)
        with daemon.admin() as admin:
            assert not admin.check().problems
    finally:
        made.storage_backend.close()


def test_an_entry_is_a_page_in_every_layout(daemon: PrivateDaemon) -> None:
    for layout in LAYOUTS:
        pool = host_pool(layout, pages=2, page_tokens=PAGE_TOKENS, layers=LAYERS)
        made = controller(pool, "dynamic", prefixd_extra(daemon.address, "ram"))
        with daemon.admin() as admin:
            before = sum(tier.entries for tier in admin.stats().tiers)
            backup(made, fresh_hashes(2), torch.arange(2 * PAGE_TOKENS))
            assert sum(tier.entries for tier in admin.stats().tiers) == before + 2
        made.storage_backend.close()


def test_a_killed_daemon_is_a_miss() -> None:
    pool = host_pool("page_first", pages=4, page_tokens=PAGE_TOKENS, layers=LAYERS)
    with private_daemon(shm="16MiB") as daemon:
        extra = {**prefixd_extra(daemon.address, "shm"), "deadline_ms": 500}
        made = controller(pool, "dynamic", extra)
        hashes, indices = fresh_hashes(4), torch.arange(4 * PAGE_TOKENS)
        assert backup(made, hashes[:2], indices[: 2 * PAGE_TOKENS]) == 2 * PAGE_TOKENS
        daemon.kill()
        assert backup(made, hashes[2:], indices[2 * PAGE_TOKENS :]) == 0
        made.storage_backend.close()


def test_a_namespace_is_of_its_layout(daemon: PrivateDaemon) -> None:
    hashes, indices = fresh_hashes(2), torch.arange(2 * PAGE_TOKENS)
    found = []
    for layout in LAYOUTS:
        pool = host_pool(layout, pages=2, page_tokens=PAGE_TOKENS, layers=LAYERS)
        made = controller(pool, "dynamic", prefixd_extra(daemon.address, "ram"))
        found.append(made.storage_backend.batch_exists(hashes))
        assert backup(made, hashes, indices) == 2 * PAGE_TOKENS
        made.storage_backend.close()
    assert found == [0] * len(LAYOUTS)
