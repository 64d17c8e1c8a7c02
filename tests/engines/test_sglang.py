"""SGLang itself: its HiCache controller, its host pool and its backend factory, unmodified.
`make engines-sglang` runs this file."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefixd.client.connectors.sglang import (
    _UPDATES,
    _WITHOUT_EFFECT,
    CONFIG_ELSEWHERE,
    _hashes_name_requests,
    identity_of,
)
from prefixd.client.ctl.private import PrivateDaemon
from tests.engines.page_commands import command
from tests.engines.sglang_hicache import (
    LAYOUTS,
    arguments,
    backup,
    controller,
    fresh_hashes,
    host_pool,
    prefetch,
    prefixd_extra,
    storage_config,
    without_torchvision,
)
from tests.support.daemon import private_daemon
from tests.support.decisions import fields_of

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


def test_the_daemon_shows_the_ratio_that_sglang_sees() -> None:
    """Of prompts of random pages, of which some were backed up."""
    chance = random.Random(3)
    pool = host_pool("page_first", pages=PAGES, page_tokens=PAGE_TOKENS, layers=LAYERS)
    with private_daemon(ram="64MiB", shm="0", disk="0") as daemon:
        made = controller(pool, "dynamic", prefixd_extra(daemon.address, "ram"))
        looked = hit = 0
        for _ in range(20):
            hashes, kept = fresh_hashes(chance.randint(1, PAGES)), chance.randint(0, PAGES)
            kept = min(kept, len(hashes))
            indices = torch.arange(kept * PAGE_TOKENS)
            assert backup(made, hashes[:kept], indices) == kept * PAGE_TOKENS
            looked += len(hashes)
            hit += made.storage_backend.batch_exists(hashes)
        made.storage_backend.close()
        with daemon.admin() as admin:
            (told,) = (each for each in admin.stats().usage.values() if each.lookups)
        assert 0 < hit < looked
        assert told.lookup_tokens == looked * PAGE_TOKENS
        assert sum(tier.hit_tokens for tier in told.tiers) == hit * PAGE_TOKENS


def test_the_page_followed_literally(daemon: PrivateDaemon) -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(command("sglang.md", "python", "-m", "sglang.launch_server"))
    assert given.enable_hierarchical_cache
    extra = json.loads(given.hicache_storage_backend_extra_config)
    extra["address"] = daemon.address
    pool = host_pool("page_first", pages=PAGES, page_tokens=PAGE_TOKENS, layers=LAYERS)
    made = controller(pool, given.hicache_storage_backend, extra)
    hashes, indices = fresh_hashes(2), torch.arange(2 * PAGE_TOKENS)
    assert backup(made, hashes, indices) == 2 * PAGE_TOKENS
    assert prefetch(made, hashes, indices) == 2
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


# ---- what SGLang tells: every argument and field is in the key, or has no effect by name

OPTIONS = {"fingerprint": "test weights"}


def digest(config: Any = None, arguments: Any = None) -> bytes:
    pool = SimpleNamespace(layout="page_first", dtype="torch.bfloat16")
    return identity_of(config or storage_config(), OPTIONS, pool, "kv", arguments).digest


def test_every_argument_is_in_the_key_or_without_effect_by_name() -> None:
    names = set(vars(arguments()))
    assert set(_WITHOUT_EFFECT) <= names, "these are no arguments any more"
    same = digest(arguments=arguments())
    unlike = {name for name in names if digest(arguments=arguments(**{name: "other"})) != same}
    # In dimensions of their own.
    assert names - unlike == _WITHOUT_EFFECT - {"lora_paths"}


def test_sglangs_own_arguments_are_those_that_the_connector_reads() -> None:
    from sglang.srt.server_args import ServerArgs

    given = ServerArgs(model_path="/none")
    assert digest(arguments=given) == digest(arguments=arguments())


def test_every_field_of_the_storage_configuration_is_decided() -> None:
    config = storage_config()
    same = digest(config)
    for name in fields_of(config):
        other = copy(config)
        setattr(other, name, {"x": 1} if name == "extra_config" else 7)
        elsewhere = name in CONFIG_ELSEWHERE - {"tp_rank", "tp_size"}
        assert (digest(other) == same) is elsewhere, name


def test_sglangs_hashes_name_adapters_and_salts() -> None:
    from sglang.srt.mem_cache.utils import storage_namespace_seed

    assert _hashes_name_requests()
    seeds = [storage_namespace_seed(*each) for each in ((None, None), ("a", None), (None, "a"))]
    assert len(set(seeds)) == 3


def test_sglangs_hooks_reach_the_backends() -> None:
    """In an interpreter of its own, because hooks stay. With a stand-in for the scheduler, which
    can't be imported without packages for a device."""
    script = """
import sys
from types import ModuleType
from sglang.srt.plugins.hook_registry import HookRegistry
from prefixd.client.connectors import plugins, sglang
class SchedulerWeightUpdaterManager:
    def update_weights_from_disk(self): return "updated"
    def end_weight_update(self): raise RuntimeError
class Scheduler:
    def flush_cache(self, empty_cache=True): return True
kinds = {sglang._UPDATER: SchedulerWeightUpdaterManager, sglang._SCHEDULER: Scheduler}
for name, kind in kinds.items():
    sys.modules[name] = ModuleType(name)
    setattr(sys.modules[name], kind.__name__, kind)
plugins.register_sglang()
HookRegistry.apply_hooks()
class Backend:
    told = []
    def weights_updated(self): self.told.append("updated")
    def cache_flushed(self): self.told.append("flushed")
backend = Backend()
sglang._backends.add(backend)
assert SchedulerWeightUpdaterManager().update_weights_from_disk() == "updated"
assert Scheduler().flush_cache(empty_cache=False) is True
try:
    SchedulerWeightUpdaterManager().end_weight_update()
except RuntimeError:
    print(backend.told)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False
    )
    assert "['updated', 'flushed', 'updated']" in done.stdout, done.stderr


def test_sglangs_scheduler_has_what_the_hooks_rely_on() -> None:
    spec = importlib.util.find_spec("sglang.srt.managers")
    assert spec is not None
    (folder,) = map(Path, spec.submodule_search_locations or ())

    def methods(file: str, name: str) -> set[str]:
        body = ast.parse((folder / file).read_text()).body
        (kind,) = (each for each in body if isinstance(each, ast.ClassDef) and each.name == name)
        return {each.name for each in kind.body if isinstance(each, ast.FunctionDef)}

    updater = "scheduler_components/weight_updater.py"
    assert set(_UPDATES) <= methods(updater, "SchedulerWeightUpdaterManager")
    assert "flush_cache" in methods("scheduler.py", "Scheduler")
    # The flush is within the update, and empties the queue of saves.
    assert (folder / updater).read_text().count("self.flush_cache_after_weight_update(") == 4
    assert "self.backup_queue.queue.clear()" in (folder / "cache_controller.py").read_text()
