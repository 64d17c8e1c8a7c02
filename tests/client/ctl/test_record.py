"""`prefixctl trace record`: what clients of a running daemon look up, replayed offline."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from prefixd.client import Client
from prefixd.client.ctl.main import app
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.lab.live_replay import LiveReplay
from prefixd.client.lab.recorded import LookupOrder
from prefixd.client.lab.replayer import LiveOptions
from prefixd.client.lab.simulate import Cell, TouchOrder, replay
from prefixd.client.lab.trace import TraceColumns, TraceReader
from prefixd.client.lab.workloads import generate
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key, Namespace
from prefixd.proto.vocabulary import SaveReason, Tier
from tests.support.daemon import eventually, private_daemon
from tests.support.fakes import PATIENCE_S
from tests.support.lengths import times

SLOTS = 80
KEYS = [Key(bytes([number]) * 32) for number in range(3)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    """Holds exactly 80 blocks of 4 KiB."""
    with private_daemon(ram=f"{4 * SLOTS}KiB") as running:
        yield running


def ctl(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


class Recording:
    """The command in a thread of its own. It has begun when this is made."""

    def __init__(self, daemon: PrivateDaemon, *arguments: object) -> None:
        self.result: Result | None = None
        command = ("trace", "record", "--address", daemon.address, "--json", *arguments)

        def run() -> None:
            self.result = ctl(*command)

        self._thread = threading.Thread(target=run)
        self._thread.start()
        with Client(daemon.address) as client:  # its session says when it is asked
            eventually(lambda: client._recorders.active)

    def end(self) -> dict[str, Any]:
        """What it printed."""
        self._thread.join()
        assert self.result is not None
        assert self.result.exit_code == 0, self.result.output
        return dict(json.loads(self.result.stdout))


@pytest.mark.parametrize(("in_place", "workers"), [(False, 1), (True, 1), (True, 3)])
def test_a_recorded_replay_gives_the_live_hits_offline(
    daemon: PrivateDaemon, tmp_path: Path, in_place: bool, workers: int
) -> None:
    requests = list(generate("multi-turn", requests=times(60, 90), seed=3, block_tokens=512))
    looked = [request for request in requests if request.hash_ids]
    path = tmp_path / "trace.jsonl.gz"
    recording = Recording(daemon, "-o", path, "--limit", len(looked))
    options = LiveOptions(
        daemon.address, in_place=in_place, workers=workers, salt=f"{in_place} {workers}"
    )
    totals = LiveReplay(requests, options, lambda _: None).run()
    data = recording.end()
    assert (data["requests"], data["dropped"], data["unnamed"]) == (len(looked), 0, 0)
    assert data["prompt_tokens"] == totals.prompt_tokens
    # What others evict before it is read was hit by the look-up all the same.
    assert data["hit_blocks"] >= totals.hit_blocks > 0
    if workers == 1:
        assert data["hit_blocks"] == totals.hit_blocks
        assert offline(path) == totals.hit_tokens > 0
        document = json.loads(ctl("replay", path, "--policy", "lru", "--capacity-blocks", SLOTS,
                                  "--touch-order", "root-mru", "--json").stdout)  # fmt: skip
        assert document["results"][0]["total_hit_tokens"] == totals.hit_tokens
    with daemon.admin() as admin:
        eventually(lambda: not admin.stats().sessions)
        admin.evict(2**40, [])


def offline(path: Path) -> int:
    trace = TraceColumns.load(TraceReader(path))
    return replay(trace, Cell("lru", SLOTS, TouchOrder.ROOT_MRU)).total_hit_tokens


def test_what_is_not_in_the_trace_is_said(daemon: PrivateDaemon, tmp_path: Path) -> None:
    namespace = Namespace(fingerprint=bytes(32), quantisation=b"", context_params=bytes(32))
    path = tmp_path / "trace.jsonl"
    recording = Recording(daemon, "-o", path, "--limit", 3)
    with Client(daemon.address, label="team-a") as client:
        eventually(lambda: client._recorders.active)
        client.save(KEYS[0], b"x", tier=Tier.RAM, reason=SaveReason.FINISH)
        client.exists_one(KEYS[0])
        client.longest_prefix(namespace, [1, 2, 3])
        client.longest_run(KEYS).release()  # nobody says how many tokens these are
        client.longest_run(KEYS, prompt_tokens=48).release()
        client.longest_run(KEYS[:2], prompt_tokens=32).release()
        client.longest_run(client.chain(namespace, range(64), 16)).release()
    data = recording.end()
    assert (data["requests"], data["unnamed"], data["untold"]) == (3, 2, 1)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["input_length"], line["label"]) for line in found] == [
        (48, "team-a"),
        (32, "team-a"),
        (64, "team-a"),
    ]
    assert [line.get("block_size") for line in found] == [None, None, 16]
    assert found[0]["hash_ids"][:2] == found[1]["hash_ids"]
    text = path.read_text()
    assert not any(key.hex()[:16] in text for key in KEYS)
    assert recording.result is not None
    for sentence in ("2 look-ups are not in the trace", "1 look-ups are not in the trace"):
        assert sentence in recording.result.stderr


def test_it_ends_after_a_time_and_without_requests_writes_nothing(
    daemon: PrivateDaemon, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    result = ctl("trace", "record", "--address", daemon.address, "-o", path, "--for", "10ms")
    assert result.exit_code == 1
    assert "nothing was recorded" in result.stderr
    assert not path.exists()


def test_ctrl_c_ends_it_with_a_whole_trace(daemon: PrivateDaemon, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"

    def look_up_and_interrupt() -> None:
        with Client(daemon.address) as client:
            eventually(lambda: client._recorders.active)
            client.longest_run(KEYS, prompt_tokens=48).release()
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=look_up_and_interrupt)
    thread.start()
    result = ctl("trace", "record", "--address", daemon.address, "-o", path, "--json")
    thread.join()
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["requests"] == 1
    assert [r.input_length for r in TraceReader(path, block_tokens=16)] == [48]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_daemon_that_goes_away_leaves_what_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl"
    came = threading.Event()

    class Order(LookupOrder):
        def take(self, response: pb.RecordResponse, now_s: float) -> None:
            super().take(response, now_s)
            if response.lookups:
                came.set()

    monkeypatch.setattr("prefixd.client.lab.recorded.LookupOrder", Order)
    with private_daemon() as daemon, Client(daemon.address) as client:

        def look_up_and_stop() -> None:
            eventually(lambda: client._recorders.active)
            client.longest_run(KEYS, prompt_tokens=48).release()
            assert came.wait(PATIENCE_S)
            with daemon.admin() as admin:
                admin.drain(0, stop=True, resume=False)

        thread = threading.Thread(target=look_up_and_stop)
        thread.start()
        result = ctl("trace", "record", "--address", daemon.address, "-o", path, "--json")
        thread.join()
    assert result.exit_code in (1, 3)
    assert json.loads(result.stdout)["requests"] == 1
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--sample", "0"), "a sample is a share of 0.001 to 1"),
        (("--sample", "nan"), "a sample is a share of 0.001 to 1"),
        (("-o", "-", "--keep", "2"), "standard output can't be rotated"),
        (("--max-size", "0"), "at least 1 byte"),
    ],
)
def test_mistakes(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    result = ctl("trace", "record", "-o", tmp_path / "trace.jsonl", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_a_file_that_exists_is_not_replaced(tmp_path: Path) -> None:
    for name, arguments in (("trace.jsonl", ()), ("trace.1.jsonl", ("--keep", "1"))):
        (tmp_path / name).touch()
        result = ctl("trace", "record", "-o", tmp_path / "trace.jsonl", *arguments)
        assert result.exit_code == 2
        assert f"{name} exists already" in result.stderr
        (tmp_path / name).unlink()
