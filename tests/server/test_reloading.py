"""Which options change live and which need a restart; an invalid configuration changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import ConfigError
from prefixd.proto.vocabulary import Tier
from prefixd.server.config.loading import load_config
from prefixd.server.config.options import Config
from prefixd.server.reloading import FileChange, FilesRead, Reloader, values
from tests.support.event_loop import in_loop
from tests.support.running import Refused, Running, answer, key, payload, running


@pytest.fixture(autouse=True)
def _level_as_before() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)


class ConfigFile:
    """A configuration file that tests edit."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "prefixd.toml"
        self.write("")

    def write(self, text: str) -> None:
        self.path.write_text(text)

    def load(self) -> Config:
        return load_config(["--config", str(self.path), "--shm.policy", "fifo"], {})


def make_reloader(daemon: Running, file: ConfigFile) -> Reloader:
    reloader = Reloader(file.load(), file.load, daemon.core, daemon.front.scrubber)
    daemon.front.admin.configurer = reloader.configure
    return reloader


CHANGED = """
[log]
level = "error"
[server]
scrub_rate = "1MiB"
[sessions]
max_pinned_share = 0.25
unwritten_ttl = "3s"
[ram]
budget = "1GiB"
[shm]
policy = "arc"
"""


@in_loop
async def test_live_options_change_and_the_others_are_named(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        file = ConfigFile(tmp_path)
        make_reloader(daemon, file)
        before = await answer(daemon.admin.Configure(pb.ConfigureRequest()))
        assert not before.changed
        assert before.running["sessions.max_pinned_share"] == "0.75"
        file.write(CHANGED)
        for apply in (False, True):
            found = await answer(daemon.admin.Configure(pb.ConfigureRequest(apply=apply)))
            changed = {each.option: each for each in found.changed}
            assert {name: each.live for name, each in changed.items()} == {
                "log.level": True,
                "server.scrub_rate": True,
                "sessions.max_pinned_share": True,
                "sessions.unwritten_ttl": True,
                "ram.budget": False,
            }, "a flag overrides the file"
            assert (changed["ram.budget"].running, changed["ram.budget"].configured) == (
                "auto",
                "1GiB",
            )
            config = daemon.tables.config
            assert (config.max_pinned_share == 0.25) is apply
            assert (config.unwritten_ttl_ns == 3_000_000_000) is apply
            assert (daemon.front.scrubber.bytes_per_second == 2**20) is apply
            assert (logging.getLogger().level == logging.ERROR) is apply
        after = await answer(daemon.admin.Configure(pb.ConfigureRequest()))
        assert [each.option for each in after.changed] == ["ram.budget"], (
            "the other options were not applied"
        )
        await daemon.assert_sound()


@in_loop
async def test_a_budget_with_which_a_start_would_evict_is_warned_of(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        file = ConfigFile(tmp_path)
        reloader = make_reloader(daemon, file)
        session = await daemon.open()
        await session.save({key(n): payload(n, 10_000) for n in range(10)}, Tier.SHM)
        for budget, warned in (("1MiB", False), ("64KiB", True), ("0", False)):
            file.write(f"[shm]\nbudget = '{budget}'\n[ram]\nbudget = '64KiB'\n")
            response = await reloader.configure(False)
            assert [each.option for each in response.changed] == ["ram.budget", "shm.budget"]
            assert [w[:34] for w in response.warnings] == warned * [
                "shm.budget is 64KiB, and the tier "
            ]


@in_loop
async def test_a_wrong_configuration_changes_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        file = ConfigFile(tmp_path)
        reloader = make_reloader(daemon, file)
        before = daemon.tables.config
        file.write(CHANGED + "[disk]\npolicy = 'best'\n")
        with pytest.raises(ConfigError, match=r"disk\.policy"):
            await reloader.configure(True)
        with pytest.raises(Refused, match="config"):
            await answer(daemon.admin.Configure(pb.ConfigureRequest(apply=True)))
        with capture_logs() as logs:
            await reloader.reload()
        assert [line["event"] for line in logs] == ["reload_refused"]
        assert daemon.tables.config is before


@in_loop
async def test_a_reload_is_logged_option_by_option(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        file = ConfigFile(tmp_path)
        reloader = make_reloader(daemon, file)
        with capture_logs() as logs:
            await reloader.reload()
            file.write("[sessions]\nmax_waiters = 5\n[ram]\nmax_entries = 7\n")
            await reloader.reload()
        assert [(line["event"], line.get("option")) for line in logs] == [
            ("nothing_to_reload", None),
            ("option_needs_restart", "ram.max_entries"),
            ("option_changed", "sessions.max_waiters"),
        ]


def test_every_option_is_shown_as_it_is_written() -> None:
    shown = {option: text for option, (text, _) in values(load_config([], {})).items()}
    assert shown["server.scrub_rate"] == "8MiB"
    assert shown["sessions.heartbeat"] == "2s"
    assert shown["disk.sync"] == "true"


@in_loop
async def test_files_that_are_wrong_change_nothing_either(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        file = ConfigFile(tmp_path)
        reloader = make_reloader(daemon, file)
        good = used = False

        def use() -> None:
            nonlocal used
            used = True

        def read_files() -> FilesRead:
            if not good:
                raise ConfigError("server.tokens: line 1")
            return FilesRead([FileChange("server.tokens", "2 tokens", "3")], use)

        reloader.read_files = read_files
        before = daemon.tables.config
        file.write(CHANGED)
        for apply in (False, True):
            with pytest.raises(ConfigError, match=r"server\.tokens"):
                await reloader.configure(apply)
        assert daemon.tables.config is before
        good = True
        response = await reloader.configure(False)
        assert not used, "showing changes applied them"
        found = {each.option: (each.configured, each.live) for each in response.changed}
        assert found["server.tokens"] == ("3", True)
        await reloader.configure(True)
        assert used
        assert daemon.tables.config.max_pinned_share == 0.25
