"""Measures how evenly a saturated daemon serves clients that save all the time.

    python tests/bench/bench_savers.py                             # 32 with staging memory
    python tests/bench/bench_savers.py --staged 16 --socket 16     # half of them without
    python tests/bench/bench_savers.py --staged 31 --grpc 1        # one that insists on gRPC

Each has a session of its own and saves 8 x 64 KiB again and again, one call at a time. One process
makes the calls over the local socket, in few instructions, so that the daemon has most to do; each
client over gRPC is a process. Prints the calls of the slowest and the fastest client of each kind,
slowest / fastest over all, their sum a second, and the daemon's CPU time for a save. The sums of
two runs can be compared only if the machine has nothing else to do.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from prefixd.client import Client, SaveItem
from prefixd.client.counters import ClientCounters
from prefixd.client.local.local_transport import LocalTransport
from prefixd.client.wire import messages
from prefixd.client.wire.remote_transport import RemoteTransport
from prefixd.client.wire.transport import Item, SaveTerms, Saving
from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.proto.vocabulary import SaveReason, SaveStatus, Tier
from tests.support.daemon import private_daemon

PAYLOAD = bytes(64 * 2**10)
CRC = crc32c(PAYLOAD)
BLOCKS = 8
BODY = (PAYLOAD + frames.CRC.pack(CRC)) * BLOCKS
MOST_MS = 60_000


class Saver:
    """A client on the local socket. `ready` is called when its socket is, and goes on."""

    def __init__(self, client: Client, waits_for: Callable[[int, int], None]) -> None:
        """`waits_for` is told the socket, and the event that it waits for next."""
        transport: Any = client._transport
        assert client.wait_connected(deadline_ms=MOST_MS)
        assert client.save(Key(os.urandom(32)), PAYLOAD, tier=Tier.RAM).ok
        self.calls = 0
        self._link = (
            transport.current if isinstance(transport, RemoteTransport) else transport._link
        )
        self._staging = transport._node.staging if isinstance(transport, LocalTransport) else None
        connection = self._link.framed._take(60.0)
        self._socket: socket.socket = connection._wire._socket
        self._waits_for = waits_for
        self._unsent = memoryview(b"")
        if self._staging is not None:
            self._slot = self._staging.take_free()
            for number in range(BLOCKS):
                start = self._slot + number * len(PAYLOAD)
                self._staging.room(start, len(PAYLOAD))[:] = PAYLOAD

    def begin(self) -> None:
        empty = memoryview(b"")
        items = [
            Saving(Item(Key(os.urandom(32)), Content(len(PAYLOAD), 16)), empty)
            for _ in range(BLOCKS)
        ]
        terms = SaveTerms(Tier.RAM, SaveReason.COLD, (), 0)
        header = messages.header_in(self._link, items, terms)
        if self._staging is None:
            request = pb.FramedRequest(save=pb.RawSaveRequest(header=header))
        else:
            staged = pb.SaveStagedRequest(header=header, last=True, quiet=True)
            staged.items.extend(range(BLOCKS))
            staged.staging_offset_bytes.extend(
                self._slot + number * len(PAYLOAD) for number in range(BLOCKS)
            )
            staged.length_bytes.extend([len(PAYLOAD)] * BLOCKS)
            staged.last_parts.extend([True] * BLOCKS)
            staged.payload_crc32c.extend([CRC] * BLOCKS)
            request = pb.FramedRequest(save_staged=staged)
        self._socket.sendall(frames.frame(request))

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    def ready(self) -> None:
        if self._unsent:
            self._unsent = self._unsent[self._socket.send(self._unsent, socket.MSG_DONTWAIT) :]
            if not self._unsent:
                self._waits_for(self.fd, select.EPOLLIN)
            return
        response = frames.response_of(self._socket.recv(2**16)[frames.HEAD.size :])
        if response.HasField("save_ready"):
            self._unsent = memoryview(BODY)
            self._waits_for(self.fd, select.EPOLLOUT)
            return
        saved = all(each.status == pb.SAVE_STATUS_SAVED for each in response.save.results)
        assert saved if self._staging is None else response.save_staged.all_saved, response
        self.calls += 1
        self.begin()


def save_over_sockets(
    address: str, staged: int, plain: int, seconds: float, pipe: Connection
) -> None:
    with ExitStack() as stack:
        poll = stack.enter_context(select.epoll())
        clients = [
            stack.enter_context(Client(address, local=number < staged, save_timeout_ms=MOST_MS))
            for number in range(staged + plain)
        ]
        savers = [Saver(client, poll.modify) for client in clients]
        pipe.send(None)
        pipe.recv()
        by_fd = {saver.fd: saver for saver in savers}
        for fd, saver in by_fd.items():
            poll.register(fd, select.EPOLLIN)
            saver.begin()
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            for fd, _ in poll.poll(0.1):
                by_fd[fd].ready()
        pipe.send([saver.calls for saver in savers])
        os._exit(0)  # the calls under way are nobody's


def save_over_grpc(address: str, seconds: float, pipe: Connection) -> None:
    counters = ClientCounters()
    transport = RemoteTransport(address, counters=counters, wire="grpc")
    with Client(transport=transport, counters=counters, save_timeout_ms=MOST_MS) as client:
        assert client.wait_connected(deadline_ms=MOST_MS)

        def save() -> None:
            items = [SaveItem(Key(os.urandom(32)), PAYLOAD) for _ in range(BLOCKS)]
            saved = client.save_many(items, tier=Tier.RAM)
            assert all(each.status is SaveStatus.SAVED for each in saved), saved

        save()
        pipe.send(None)
        pipe.recv()
        calls, end_s = 0, time.monotonic() + seconds
        while time.monotonic() < end_s:
            save()
            calls += 1
        pipe.send([calls])


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--staged", type=int)
    parser.add_argument("--socket", type=int, default=0)
    parser.add_argument("--grpc", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    seconds, plain = arguments.seconds, arguments.socket
    staged = arguments.staged
    if staged is None:
        staged = 0 if plain or arguments.grpc else 32
    spawning = multiprocessing.get_context("spawn")

    def started(target: Callable[..., None], *more: object) -> Iterator[Connection]:
        here, there = spawning.Pipe()
        spawning.Process(target=target, args=(*more, seconds, there), daemon=True).start()
        there.close()
        yield here

    # Areas of one size however many clients there are: none is taken back for another.
    flags = "--ram.slab=16KiB", "--server.staging=16MiB"
    with private_daemon(*flags, ram="256MiB", shm="0", disk="0") as daemon:
        address = daemon.address
        pipes = [*started(save_over_sockets, address, staged, plain)] if staged + plain else []
        for _ in range(arguments.grpc):
            pipes += started(save_over_grpc, address)
        for pipe in pipes:
            pipe.recv()
        before_s, began_s = cpu_s(daemon.pid), time.monotonic()
        for pipe in pipes:
            pipe.send(None)
        calls: list[int] = [each for pipe in pipes for each in pipe.recv()]
        used_s, took_s = cpu_s(daemon.pid) - before_s, time.monotonic() - began_s
    kinds = {
        "staged": calls[:staged],
        "socket": calls[staged : staged + plain],
        "grpc": calls[staged + plain :],
    }
    for kind, its in kinds.items():
        if its:
            print(f"{kind:7} slowest {min(its)}, fastest {max(its)}")
    print(
        f"slowest / fastest {min(calls) / max(1, max(calls)):.3f}, "
        f"{sum(calls) / seconds:.0f} saves/s, the daemon took {used_s / took_s:.2f} of a "
        f"processor, {1e3 * used_s / max(1, sum(calls)):.2f} ms a save"
    )


if __name__ == "__main__":
    main()
