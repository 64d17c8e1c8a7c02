"""Every alert fires in a real Prometheus while a real daemon is in the condition that it is for,
and every panel moves that is flat while nothing is wrong.

The times of the rules are shortened in a copy; `prefixd.test.yml` has the whole ones, without a
daemon. What an alert needs is kept up until it fires, however slow the machine is.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path

import pytest

from prefixd.client import Client, Reservation, ReserveItem, Tier
from prefixd.client.lab.live_replay import LiveOptions, LiveReplay
from prefixd.client.lab.workloads import generate
from prefixd.proto.keys import Key
from tests.support.certificates import Authority
from tests.support.daemon import eventually, metrics_of
from tests.support.dashboard import OF_SHARING, ROOT, WHEN_SOMETHING_IS_WRONG, targets
from tests.support.devices import FAILING_WRITES
from tests.support.fake_redis import FakeRedis, HangUp
from tests.support.outside import ASKS_OFTEN, RAM_ALONE, DaemonProcess, daemon_process
from tests.support.prometheus import PROGRAM, Prometheus, prometheus

RULES = (ROOT / "deploy/prometheus/prefixd.yml").read_text()
#: The range of the rates in the copy.
RANGE = "8s"
SHORTER = (
    (r"for: \w+", "for: 1s"),
    (r"\[(\d+[mh]|7d)\]", f"[{RANGE}]"),
    (r"offset 7d", f"offset {RANGE}"),
    (r"> 7200", "> 2"),
)
METRICS = "--server.metrics=127.0.0.1:0"
OFTEN = "--sessions.heartbeat=500ms"

pytestmark = [
    pytest.mark.skipif(
        shutil.which(PROGRAM) is None, reason="needs prometheus (Debian: prometheus)"
    ),
    pytest.mark.timeout(600),
    pytest.mark.slow,
]


class Watching:
    """A Prometheus, and the daemons that a test had it scrape."""

    def __init__(self, made: Prometheus) -> None:
        self._made = made
        self._targets: list[str] = []

    def scrape(self, daemon: DaemonProcess) -> None:
        """Have it scraped, and wait for the first time."""
        target = metrics_of(daemon)
        self._targets.append(target)
        self._made.scrape(self._targets)
        eventually(lambda: self._made.now(f'prefixd_healthy{{instance="{target}"}} >= 0'))

    def fires(self, alert: str) -> None:
        """Wait until the alert fires for one of the daemons."""
        instances = "|".join(map(re.escape, self._targets)).replace("\\", "\\\\")
        labels = f'alertname="{alert}",alertstate="firing",instance=~"{instances}"'
        eventually(lambda: self._made.now(f"ALERTS{{{labels}}}"), within_s=240)

    def moves(self, panel: str) -> None:
        """Wait until something in the panel is above zero for one of the daemons."""
        instances = "|".join(self._targets)
        expressions = [
            expression.replace("$__rate_interval", RANGE).replace("$instance", instances)
            for title, expression in targets()
            if title == panel
        ]
        assert expressions
        eventually(
            lambda: any(value > 0 for each in expressions for value in self._made.now(each)),
            within_s=240,
        )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    rules = RULES
    for pattern, shorter in SHORTER:
        rules, found = re.subn(pattern, shorter, rules)
        assert found, pattern
    copy = tmp_path_factory.mktemp("rules") / "prefixd.yml"
    copy.write_text(rules)
    with prometheus("", copy) as running:
        yield running


@pytest.fixture
def watching(made: Prometheus) -> Watching:
    return Watching(made)


@contextmanager
def again_and_again(act: Callable[[], object]) -> Iterator[None]:
    """Act, in a thread, until the end of the context."""
    over, problems = threading.Event(), list[BaseException]()

    def loop() -> None:
        try:
            while not over.wait(0.05):
                act()
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not problems, problems


def numbered() -> Iterator[Key]:
    return (Key(b"%032d" % number) for number in count())


def test_each_alert_and_each_panel_has_its_condition_here() -> None:
    here = Path(__file__).read_text()
    assert set(re.findall(r'fires\("(\w+)"', here)) == set(re.findall(r"alert: (\w+)", RULES))
    panels = WHEN_SOMETHING_IS_WRONG | OF_SHARING
    assert set(re.findall(r'moves\("([\w /]+)"', here)) == panels


def test_a_daemon_that_is_gone(watching: Watching) -> None:
    with daemon_process(METRICS, *RAM_ALONE) as daemon:
        daemon.start()
        watching.scrape(daemon)
        daemon.kill()
        watching.fires("PrefixdDown")


def test_a_device_that_fails(watching: Watching) -> None:
    keys = numbered()
    with daemon_process(METRICS) as daemon:
        daemon.run_with(FAILING_WRITES)
        daemon.start()
        watching.scrape(daemon)
        (daemon.directory / "ill").touch()
        with (
            Client(daemon.address) as client,
            again_and_again(lambda: client.save(next(keys), b"bytes", tier=Tier.DISK)),
        ):
            watching.fires("PrefixdUnhealthy")
            watching.fires("PrefixdSavesFail")
            watching.moves("Ill parts")


def test_a_disk_that_is_not_mounted(watching: Watching) -> None:
    with daemon_process(METRICS) as daemon:
        daemon._command.append(f"--disk.mount={daemon.directory}")
        daemon.start_unwell()
        watching.scrape(daemon)
        watching.fires("PrefixdTierClosed")


def test_a_certificate_of_two_days(watching: Watching, tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path / "ca").sign("daemon", days=2)
    flags = (f"--server.tls_cert={certificate}", f"--server.tls_key={key}")
    with daemon_process(METRICS, *RAM_ALONE, "--server.tcp=127.0.0.1:0", *flags) as daemon:
        daemon.start()
        watching.scrape(daemon)
        watching.fires("PrefixdCertificateEnds")
        watching.fires("PrefixdNotice")
        watching.moves("Notices")


def test_a_loop_that_is_late_and_clients_without_an_answer(watching: Watching) -> None:
    keys = numbered()
    with daemon_process(METRICS, OFTEN, *RAM_ALONE) as daemon:
        daemon.start()
        watching.scrape(daemon)
        rests = threading.Event()

        def stop_for_a_while() -> None:
            os.kill(daemon.pid, signal.SIGSTOP)
            rests.wait(0.3)
            os.kill(daemon.pid, signal.SIGCONT)

        with (
            Client(daemon.address, local=False, deadline_ms=50) as client,
            again_and_again(lambda: client.claim([next(keys)])),
            again_and_again(stop_for_a_while),
        ):
            watching.fires("PrefixdLoopLate")
            watching.fires("PrefixdClientsMissIt")


def test_bytes_that_change(watching: Watching) -> None:
    keys = numbered()
    with daemon_process(METRICS, OFTEN, "--disk.budget=0", "--server.scrub_rate=1B") as daemon:
        daemon.start()
        watching.scrape(daemon)
        arena = max(daemon.shm_directory.rglob("*"), key=lambda path: path.stat().st_size)
        room = bytearray(4096)

        def damage(client: Client) -> None:
            key = next(keys)
            # Not the key again and again: that of 17 and that of 170 are in each other.
            data = random.Random(bytes(key)).randbytes(len(room))
            assert client.save(key, data, tier=Tier.SHM).ok
            place = arena.read_bytes().index(data)
            with arena.open("r+b") as file:
                file.seek(place)
                file.write(bytes([data[0] ^ 1]))
            with client.claim([key]) as hit:
                assert not hit.restore_into([room])

        with Client(daemon.address) as client, again_and_again(lambda: damage(client)):
            watching.fires("PrefixdCorrupt")
            watching.fires("PrefixdScrubLate")
            watching.moves("Damage")
            watching.moves("Failed reads / s")


def test_a_tier_that_is_held(watching: Watching) -> None:
    keys, lost = numbered(), numbered()
    flags = ("--ram.budget=64KiB", "--sessions.max_pinned_share=1", "--sessions.unwritten_ttl=1s")
    with daemon_process(METRICS, OFTEN, *RAM_ALONE, *flags) as daemon:
        daemon.start()
        watching.scrape(daemon)
        with Client(daemon.address) as holder, Client(daemon.address) as saver:
            held = [next(keys) for _ in range(16)]
            for key in held:
                assert holder.save(key, bytes(4096), tier=Tier.RAM).ok
            kept: list[Reservation] = []

            def reserve() -> None:
                kept.extend(saver.reserve([ReserveItem(next(lost), 1)], tier=Tier.RAM))

            with again_and_again(reserve):
                watching.moves("Lost / s")
            saver.cancel([each for each in kept if each.granted])
            eventually(lambda: all(saver.save(key, bytes(4096), tier=Tier.RAM).ok for key in held))
            with (
                holder.claim(held) as hit,
                again_and_again(lambda: saver.save(next(keys), bytes(4096), tier=Tier.RAM)),
            ):
                assert len(hit) == len(held)
                watching.fires("PrefixdNoRoom")
                watching.fires("PrefixdOldClaim")


def test_traffic_that_is_larger_than_its_tier(watching: Watching) -> None:
    requests = list(generate("multi-turn", requests=40, seed=5, block_tokens=512))
    with daemon_process(METRICS, OFTEN, *RAM_ALONE, "--ram.budget=128KiB") as daemon:
        daemon.start()
        watching.scrape(daemon)
        options = LiveOptions(daemon.address, tiers=(Tier.RAM,))
        with again_and_again(lambda: LiveReplay(requests, options).run()):
            watching.fires("PrefixdEvictsWhatIsWanted")
            watching.fires("PrefixdEvictsYoung")


def test_a_shared_engine(watching: Watching) -> None:
    """Its clock is wrong, it refuses some of what it is offered, hangs up on some look-ups, and is
    gone."""
    keys, answered = numbered(), count()

    def fault(command: list[bytes]) -> bytes | None:
        word = command[0].upper()
        if word == b"SET" and next(answered) % 2:
            return b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
        if word in (b"GET", b"GETRANGE") and not next(answered) % 5:
            raise HangUp
        return None

    engine = FakeRedis()
    engine.ahead_s = 3600.0
    flags = (f"--shared.engine={engine.url}", "--shared.write=all", "--shared.life=5h")
    with (
        daemon_process(METRICS, OFTEN, *RAM_ALONE, *flags) as giver,
        daemon_process(METRICS, OFTEN, *RAM_ALONE, *flags) as taker,
        closing(engine),
    ):
        for daemon in (giver, taker):
            daemon.run_with(ASKS_OFTEN)
            daemon.start()
            watching.scrape(daemon)
        engine.fault = fault
        with Client(giver.address) as saver, Client(taker.address) as reader:
            latest: list[Key] = []

            def share() -> None:
                latest[:] = [next(keys)]
                assert saver.save(latest[0], bytes(4096), tier=Tier.RAM, token_count=16).ok

            def search() -> None:
                reader.longest_run(latest).release()

            with again_and_again(share), again_and_again(search):
                watching.fires("PrefixdSharedClock")
                watching.fires("PrefixdSharedRefused")
                watching.moves("Nodes of the engine")
                watching.moves("Offered / s")
                watching.moves("Fetched / s")
                watching.moves("Not fetched / s")
                engine.answers.clear()
                watching.moves("Waiting for the engine")
                engine.close()
                watching.fires("PrefixdSharedEngineDown")
