"""The nodes of a Valkey or Redis: which node has a key, and connections to each.

The engine is a Cluster, or a single primary, whose replicas may take over: its role is asked for
again and again, and a replica is never used. Sentinels are asked who the primary is.

redis-py reaches a node (URL, user, password, TLS) and asks it for the slots; requests with payloads
use `resp` on the sockets that redis-py opened. A thread for each node makes its connections, so
that no call waits for a dead node: a call takes an existing connection, or the node is unavailable.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit, urlunsplit

import redis
from redis.connection import ConnectionPool
from redis.crc import key_slot

from .engine_store import NodeState, NodeStatus
from .resp import RedisConnection

Address: TypeAlias = tuple[str, int]

SLOTS: Final = 16_384
#: For connecting, and for each reply while connecting or asking for the slots.
CONNECT_TIMEOUT_S: Final = 1.0
#: The first pause between attempts to reach a node, and the longest, after doubling.
RETRY_S: Final = (0.1, 5.0)
#: After this many calls in a row without an answer in time, a node rests for a while.
PATIENCE_CALLS: Final = 3
REST_S: Final = 1.0
#: How often the slots of a Cluster are requested, and the role of a single primary; sooner when a
#: node says that something moved.
TOPOLOGY_EVERY_S: Final = 30.0
PRIMARY_EVERY_S: Final = 2.0
TOPOLOGY_AT_MOST_EVERY_S: Final = 0.5
#: How long a node's latest refusal is reported.
REFUSED_FOR_S: Final = 60.0
#: `redis+sentinel://host:port/service`.
_SENTINEL: Final = "+sentinel"


class Seed(NamedTuple):
    """Where to ask first: a node, or a Sentinel that knows the primary of `service`."""

    address: Address
    service: str = ""


@dataclass(slots=True)
class EngineNode:
    """One engine process. Guarded by the lock of `Nodes`."""

    address: Address
    idle: list[RedisConnection] = field(default_factory=list)
    lent: set[RedisConnection] = field(default_factory=set)
    #: The number of connections, idle or lent.
    connections: int = 0
    #: Why there is no connection.
    problem: str = "not reached yet"
    missed_deadlines: int = 0
    rests_until_s: float = 0.0
    closed: bool = False
    #: Since the node is known.
    requests: int = 0
    unanswered: int = 0
    refused: int = 0
    #: The latest refusal in the engine's own words, and when it came.
    refusal: str = ""
    refused_at_s: float = -math.inf

    def status(self) -> NodeStatus:
        state = NodeState.SERVING
        if monotonic() < self.rests_until_s:
            state = NodeState.RESTING
        elif not self.connections:
            state = NodeState.UNREACHABLE
        why = self.problem
        if state is NodeState.SERVING:
            recent = monotonic() - self.refused_at_s < REFUSED_FOR_S
            why = f"it refuses requests: {self.refusal}" if recent else ""
        return NodeStatus(
            name_of(self.address), state, why, self.requests, self.unanswered, self.refused
        )


def seeds_of(urls: Sequence[str]) -> list[tuple[Seed, ConnectionPool]]:
    """The addresses and options of URLs, see `Nodes`. Connects to none. Raises ValueError."""
    if not urls:
        raise ValueError("a shared engine needs the address of at least one node")
    seeds = []
    for url in urls:
        parts = urlsplit(url)
        service = ""
        if parts.scheme.endswith(_SENTINEL):
            service = unquote(parts.path.strip("/"))
            if not service:
                raise ValueError(f"{url} names no service: it ends in /NAME, as Sentinel knows it")
            parts = parts._replace(scheme=parts.scheme.removesuffix(_SENTINEL), path="")
        pool = ConnectionPool.from_url(
            urlunsplit(parts),
            protocol=2,  # `resp` speaks this one
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=CONNECT_TIMEOUT_S,
        )
        host = str(pool.connection_kwargs.get("host", "localhost"))
        port = int(pool.connection_kwargs.get("port", 26_379 if service else 6_379))
        seeds.append((Seed((host, port), service), pool))
    return seeds


class Nodes:
    """All nodes of one engine. Thread-safe."""

    def __init__(
        self, urls: Sequence[str], connections_per_node: int, password: str | None = None
    ) -> None:
        """`urls`: `redis://[[user]:password@]host:port[?option=...]`, or `rediss://` for TLS, of
        some of the nodes; or `redis+sentinel://host:port/service` of Sentinels. The user, password
        and options of the first are used for all nodes. `password`: replaces that of the URLs.
        Connects in the background. Raises ValueError for an invalid URL."""
        seeds = seeds_of(urls)
        pool = seeds[0][1]
        self._options: Final[dict[str, Any]] = dict(pool.connection_kwargs)
        if password is not None:
            self._options["password"] = password
        self._connection_class: Final[Any] = pool.connection_class
        self._seeds: Final[list[Seed]] = [seed for seed, _ in seeds]
        self._single = False
        self._per_node: Final = connections_per_node
        self._changed: Final = threading.Condition()
        self._nodes: dict[Address, EngineNode] = {}
        #: The node that serves each slot. None: no node does.
        self._slots: list[Address | None] = [None] * SLOTS
        self._problem = "its slots are not known yet"
        self._known = False
        self._topology_due_s = 0.0
        self._topology_at_s = -TOPOLOGY_AT_MOST_EVERY_S
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._spawn(self._keep_topology, "prefixd-shared-slots")

    def wait_until_reached(self, timeout_s: float) -> bool:
        """Wait until every node has all its connections. False: the time is over. For a start and
        for tests; calls need not wait."""
        with self._changed:
            return self._changed.wait_for(self._all_reached, timeout_s)

    def close(self) -> None:
        """End everything; lent connections break at once. Returns when all threads have ended,
        which takes as long as an attempt to connect at most."""
        with self._changed:
            self._closed = True
            for node in self._nodes.values():
                self._retire(node)
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # ---- for calls

    def of(self, name: bytes) -> Address | None:
        """The node that serves a name. None: no node does."""
        return self._slots[key_slot(name)]

    def all(self) -> list[Address]:
        """Every node that serves slots."""
        with self._changed:
            return list(self._nodes)

    def lend(self, address: Address) -> RedisConnection | None:
        """A connection for one call, to be given back. None: the node is unavailable."""
        with self._changed:
            node = self._nodes.get(address)
            if node is None or monotonic() < node.rests_until_s:
                return None
            while node.idle:
                connection = node.idle.pop()
                if connection.usable:
                    node.lent.add(connection)
                    return connection
                self._lose(node, connection, "it closed the connection")
            return None

    def give_back(self, address: Address, connection: RedisConnection) -> None:
        """The call is over. It has broken the connection if the node missed the deadline."""
        with self._changed:
            node = self._nodes.get(address)
            if node is None or node.closed:
                connection.close()
                return
            node.lent.discard(connection)
            if not connection.broken:
                node.missed_deadlines = 0
                node.idle.append(connection)
                self._changed.notify_all()
                return
            node.missed_deadlines += 1
            self._lose(node, connection, "it missed a deadline, or broke the connection")
            if node.missed_deadlines >= PATIENCE_CALLS:
                node.rests_until_s = monotonic() + REST_S
                node.problem = f"it missed {node.missed_deadlines} deadlines in a row"

    def moved(self) -> None:
        """A node does not serve a slot that it should: ask for all slots again, soon."""
        with self._changed:
            self._topology_due_s = 0.0
            self._changed.notify_all()

    def renew(self, address: Address) -> None:
        """The node behind this address is no primary any more: ask who is, and connect again, as
        the name may lead to another machine by now."""
        with self._changed:
            node = self._nodes.get(address)
            if node is not None:
                for connection in node.idle:
                    self._lose(node, connection, "it is a replica now")
                node.idle.clear()
            self._topology_due_s = 0.0
            self._changed.notify_all()

    def count(
        self, address: Address, requests: int, unanswered: int, refused: int, refusal: str = ""
    ) -> None:
        """Count requests to a node, and those without an answer or with an error. `refusal`: what
        the engine said to one that it will refuse again."""
        with self._changed:
            node = self._nodes.get(address)
            if node is not None:
                node.requests += requests
                node.unanswered += unanswered
                node.refused += refused
                if refusal:
                    node.refusal, node.refused_at_s = refusal, monotonic()

    def statuses(self) -> list[NodeStatus]:
        """Each node, by address. Removes connections that broke since their last use."""
        with self._changed:
            for node in self._nodes.values():
                for connection in [each for each in node.idle if not each.usable]:
                    node.idle.remove(connection)
                    self._lose(node, connection, "it closed the connection")
            return [self._nodes[address].status() for address in sorted(self._nodes)]

    def problems(self) -> dict[str, str]:
        """What is unavailable now, and why."""
        found = {node.name: node.why for node in self.statuses() if node.why}
        if not self._known:
            found["slots"] = self._problem
        return found

    def client(self, address: Address, **changed: Any) -> Any:
        """redis-py's own client of one node (`redis.Redis`, whose types say little), for requests
        without payloads. `changed`: options that differ from those of the nodes. The caller closes
        it."""
        options = self._options | changed | {"host": address[0], "port": address[1]}
        pool = ConnectionPool(connection_class=self._connection_class, **options)
        return redis.Redis.from_pool(pool)

    # ---- threads

    def _spawn(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _all_reached(self) -> bool:
        return self._known and all(
            len(node.idle) == self._per_node for node in self._nodes.values()
        )

    def _keep_topology(self) -> None:
        while True:
            with self._changed:
                while not self._closed:
                    earliest_s = self._topology_at_s + TOPOLOGY_AT_MOST_EVERY_S
                    wait_s = max(self._topology_due_s, earliest_s) - monotonic()
                    if wait_s <= 0:
                        break
                    self._changed.wait(wait_s)
                if self._closed:
                    return
                # Sentinels know better than a node which was the primary.
                known = [] if self._seeds[0].service else [Seed(each) for each in self._nodes]
            slots, problem = self._ask_for_slots([*known, *self._seeds])
            with self._changed:
                self._topology_at_s = monotonic()
                every_s = PRIMARY_EVERY_S if self._single else TOPOLOGY_EVERY_S
                self._topology_due_s = self._topology_at_s + every_s
                if problem:
                    self._problem = problem
                    self._topology_due_s = self._topology_at_s + 2 * TOPOLOGY_AT_MOST_EVERY_S
                if slots is not None:
                    self._adopt(slots, known=not problem)

    def _ask_for_slots(self, seeds: Sequence[Seed]) -> tuple[list[Address | None] | None, str]:
        """The node of each slot; None: nobody could tell. And why nobody could, or why no node is
        used."""
        problem, replicas_only = "", False
        for seed in dict.fromkeys(seeds):
            try:
                if seed.service:
                    self._single = True
                    return [self._primary(self._told_by(seed))] * SLOTS, ""
                with contextlib.closing(self.client(seed.address)) as client:
                    ranges = client.execute_command("CLUSTER SLOTS")
                self._single = False
                return slots_of(ranges, seed.address[0]), ""
            except NoPrimary as error:
                problem, replicas_only = str(error), True
            except (redis.RedisError, OSError, ValueError) as error:
                problem = f"{name_of(seed.address)}: {error}"
                if "cluster support disabled" in str(error):
                    self._single = True
                    try:
                        return [self._primary(seed.address)] * SLOTS, ""
                    except NoPrimary as none:
                        problem, replicas_only = str(none), True
                    except (redis.RedisError, OSError) as unreachable:
                        problem = f"{name_of(seed.address)}: {unreachable}"
            if self._closed:
                break
        return ([None] * SLOTS if replicas_only else None), problem

    def _told_by(self, sentinel: Seed) -> Address:
        """The primary's address. Raises redis.RedisError, OSError."""
        question = "SENTINEL GET-MASTER-ADDR-BY-NAME", sentinel.service
        try:
            with contextlib.closing(self.client(sentinel.address)) as client:
                answer = client.execute_command(*question)
        except redis.AuthenticationError:  # most Sentinels have no password
            without = {"username": None, "password": None}
            with contextlib.closing(self.client(sentinel.address, **without)) as client:
                answer = client.execute_command(*question)
        if not answer:
            raise redis.RedisError(f"it knows no service {sentinel.service}")
        return address_of(answer)

    def _primary(self, address: Address) -> Address:
        """The primary: the node at `address`, or the one that it replicates. Raises NoPrimary,
        redis.RedisError, OSError."""
        role = self._role(address)
        if role is None:
            return address
        try:
            follows = self._role(role)
        except (redis.RedisError, OSError) as error:
            why = f"{name_of(address)} is a replica, and its primary can't be reached: {error}"
            raise NoPrimary(why) from None
        if follows is None:
            return role
        raise NoPrimary(f"{name_of(address)} and {name_of(role)} are replicas; there is no primary")

    def _role(self, address: Address) -> Address | None:
        """Whom the node replicates. None: nobody, or it does not say. Raises redis.RedisError,
        OSError."""
        try:
            with contextlib.closing(self.client(address)) as client:
                role = client.execute_command("ROLE")
            return address_of(role[1:3]) if bytes(role[0]) in (b"slave", b"replica") else None
        except (redis.ResponseError, TypeError, ValueError, IndexError):
            # Not allowed, not known, or answered in another form. A replica refuses what it is told
            # to store.
            return None

    def _adopt(self, slots: list[Address | None], *, known: bool) -> None:
        self._slots, self._known = slots, known
        serving = {address for address in slots if address is not None}
        for address in self._nodes.keys() - serving:
            self._retire(self._nodes.pop(address))
        for address in sorted(serving - self._nodes.keys()):
            node = self._nodes[address] = EngineNode(address)
            self._spawn(partial(self._keep_connected, node), f"prefixd-shared-{address}")
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._changed.notify_all()

    def _keep_connected(self, node: EngineNode) -> None:
        retry_s = RETRY_S[0]
        while True:
            with self._changed:
                while not node.closed and node.connections >= self._per_node:
                    self._changed.wait()
                rest_s = node.rests_until_s - monotonic()
                if rest_s > 0 and not node.closed:
                    self._changed.wait(rest_s)
                    continue
                if node.closed:
                    return
            try:
                connection = self._connect(node.address)
            except (redis.RedisError, OSError) as error:
                with self._changed:
                    node.problem = str(error)
                    # Another node may have taken over its slots.
                    self._topology_due_s = min(self._topology_due_s, monotonic())
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: node.closed, retry_s)
                retry_s = min(2 * retry_s, RETRY_S[1])
                continue
            retry_s = RETRY_S[0]
            with self._changed:
                if node.closed:
                    connection.close()
                    return
                node.idle.append(connection)
                node.connections += 1
                self._changed.notify_all()

    def _connect(self, address: Address) -> RedisConnection:
        made = self._connection_class(**self._options | {"host": address[0], "port": address[1]})
        made.connect()
        made.send_command("PING")
        made.read_response()
        # redis-py has no public way to hand its socket over; this makes it forget the socket.
        connected, made._sock = made._sock, None
        return RedisConnection(connected)

    def _lose(self, node: EngineNode, connection: RedisConnection, problem: str) -> None:
        connection.close()
        node.connections -= 1
        node.problem = problem
        self._topology_due_s = min(self._topology_due_s, monotonic())
        self._changed.notify_all()

    def _retire(self, node: EngineNode) -> None:
        node.closed = True
        for connection in node.idle:
            connection.close()
        node.idle.clear()
        for connection in node.lent:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
        self._changed.notify_all()


class NoPrimary(Exception):
    """Every node that could be asked is a replica."""


def name_of(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


def address_of(words: Sequence[Any]) -> Address:
    """An address as engines send it: a host and a port. Raises ValueError."""
    try:
        host, port = words
        return bytes(host).decode(), int(port)
    except TypeError:
        raise ValueError(f"{words!r} is no address") from None


def slots_of(ranges: Any, node_host: str) -> list[Address | None]:
    """The primary of each slot, from the reply to CLUSTER SLOTS: for each range the first and last
    slot and its nodes, the primary first, each as host, port and more. A node that does not know
    its own name is called `node_host`. Raises ValueError."""
    slots: list[Address | None] = [None] * SLOTS
    try:
        for first, last, primary, *_ in ranges:
            host, port = primary[:2]
            address = (bytes(host or b"").decode() or node_host, int(port))
            slots[int(first) : int(last) + 1] = [address] * (int(last) + 1 - int(first))
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{ranges!r} are no slots: {problem}") from None
    if len(slots) != SLOTS:
        raise ValueError(f"{ranges!r} are not {SLOTS} slots")
    return slots
