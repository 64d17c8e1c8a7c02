"""Measures what recording look-ups costs, in CPU time of the threads that pay for it.

    python tests/bench/bench_recording.py --rounds 200 --blocks 24

The call: `longest_run` of a client on the daemon's host, with and without a recording, by turns.
The thread: what a client's recorder takes to hash and write, or to send, for each look-up.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from prefixd.client import Client
from prefixd.client.recording import (
    FolderRecorder,
    Recorder,
    Recorders,
    RecordOptions,
    SessionRecorder,
)
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import Tier
from tests.support.daemon import private_daemon

#: Calls that are timed together: the clock itself takes as long as a call.
CALLS = 200


def cpu_us(call: Callable[[], object], calls: int = CALLS) -> float:
    """CPU time of this thread for one of so many calls."""
    began_ns = time.thread_time_ns()
    for _ in range(calls):
        call()
    return (time.thread_time_ns() - began_ns) / calls / 1e3


def of_the_call(client: Client, keys: list[Key], recorder: Recorder, rounds: int) -> None:
    def look() -> None:
        client.longest_run(keys, claim=False, prompt_tokens=16 * len(keys))

    without, recording = Recorders(), Recorders()
    recording.active = (recorder,)
    took: dict[Recorders, list[float]] = {without: [], recording: []}
    for number in range(rounds):
        for each in (without, recording) if number % 2 else (recording, without):
            client._recorders = each
            took[each].append(cpu_us(look))
            recorder._pending.clear()
            recorder._keys_out = recorder._keys_in
    client._recorders = without
    show("longest_run without", took[without])
    show("longest_run with", took[recording])
    show("more", [b - a for a, b in zip(took[without], took[recording], strict=True)])

    def looked() -> None:
        recording.looked(keys, 16 * len(keys), 1)

    alone = []
    for _ in range(rounds):
        alone.append(cpu_us(looked))
        recorder._pending.clear()
        recorder._keys_out = recorder._keys_in
    show("the recorder's part alone", alone)


def show(name: str, took_us: list[float]) -> None:
    tenth, median = statistics.quantiles(took_us, n=10)[0], statistics.median(took_us)
    print(f"{name:28}{median:8.2f} us, a tenth of the rounds below {tenth:.2f}")


def of_the_thread(recorder: Recorder, keys: list[Key], rounds: int, name: str) -> None:
    took = []
    for _ in range(rounds):
        for _ in range(CALLS):
            recorder.looked(keys, 16 * len(keys), 1)
        took.append(cpu_us(recorder.flush, 1) / CALLS)
    show(name, took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=24)
    arguments = parser.parse_args()
    keys = [Key(os.urandom(32)) for _ in range(arguments.blocks)]
    gc.disable()
    record = pb.Record(secret=bytes(32), sample_permille=1000)
    with (
        tempfile.TemporaryDirectory() as folder,
        private_daemon(shm="0", disk="0") as daemon,
        Client(daemon.address) as client,
    ):
        client.wait_connected(deadline_ms=60_000)
        client.save(keys[0], b"x", tier=Tier.RAM)
        idle = SessionRecorder(record, lambda _: True)
        idle.close()  # no thread of it beside the calls
        print(f"look-ups of {arguments.blocks} keys, the first of them there")
        of_the_call(client, keys, idle, arguments.rounds)
        of_the_thread(idle, keys, arguments.rounds, "thread, for the daemon")
        files = FolderRecorder(RecordOptions(Path(folder)))
        files._stop.set()
        files._thread.join()
        of_the_thread(files, keys, arguments.rounds, "thread, into files")
        files.close()


if __name__ == "__main__":
    main()
