"""A simulated client. It speaks the protocol, reads in place with the library's code, and sends
wrong data, stalls, stops and dies as its steps say."""

from __future__ import annotations

import mmap
import os
import random
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from prefixd.client.local import arenas
from prefixd.client.local.disk_reads import DiskReads
from prefixd.client.local.node import LocalNode
from prefixd.client.restores import Restore
from prefixd.client.results import Entries, Entry
from prefixd.client.wire.deadline import Deadline
from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.entry import Content
from prefixd.proto.errors import ClaimLost, StaleIncarnation, UnknownSession
from prefixd.proto.index import unpack_row
from prefixd.proto.keys import Key
from prefixd.proto.payload import FlatBytes, Pieces
from prefixd.proto.vocabulary import DeleteStatus, MissReason, SaveReason, Tier
from prefixd.server.api.calls import Process as CallerProcess
from tests.sim import oracle as promises
from tests.sim.daemon import HEARTBEAT_S, STAGING_BYTES, SimDaemon
from tests.sim.network import Call, Handed, Refused, Unreachable
from tests.sim.oracle import GONE_FOR_EVER, key_of
from tests.sim.plan import Step
from tests.sim.saving import save
from tests.sim.world import Process, World
from tests.support.columns import Item, columns

if TYPE_CHECKING:
    from tests.sim.run import Run

#: The longest that any call may take, even with device faults: hangs and stops end, stalled streams
#: are cut off, and waits are bounded.
BOUND_S: Final = 90

#: Attempts to find a serving daemon, 100 ms apart.
_CONNECT_ATTEMPTS: Final = 40


#: Of reads that don't wait: all that find every page in the cache.
LATER: Final = Deadline(10**9)
#: How much longer than its deadline a read may take, and when buffers are looked at again.
_LATE_NS: Final = 100_000_000
_LOOK_NS: Final = 10_000_000_000


class Session:
    """An open session with one start of a daemon, and the descriptors that it received."""

    def __init__(self, client: SimClient, daemon: SimDaemon) -> None:
        self.daemon = daemon
        self.lost = False
        self.claims: list[int] = []
        self._client = client
        world = client.world
        self.call = Call(world, daemon, "session", caller=client.caller)
        self.call.send(pb.SessionRequest(hello=pb.Hello(client_name=client.name, pid=1)))
        client.wait_response(self.call)
        welcome = self.call.responses.popleft().welcome
        self.ref = pb.SessionRef(
            incarnation=welcome.incarnation,
            session_id=welcome.session_id,
            secret=welcome.session_secret,
        )
        self._beats = 0
        world.later(HEARTBEAT_S * 10**9, self._beat)
        handed: Handed = client.ask(daemon, "hand_over", pb.HandOverRequest(session=self.ref))
        self.staging: mmap.mmap | None = None
        descriptors = handed.take()
        if frames.STAGING in descriptors:
            fd, _ = descriptors.pop(frames.STAGING)
            self.staging = mmap.mmap(fd, STAGING_BYTES)
            os.close(fd)
        # Without a connection: the client makes the calls. The default of DiskReads is the real
        # `preadv`.
        reads = DiskReads(lambda *call: arenas.os.preadv(*call))
        self.node = LocalNode(descriptors, handed.refused, self.ref, None, reads)  # type: ignore[arg-type]

    @property
    def over(self) -> bool:
        return self.lost or self.call.ended

    @property
    def known_to_be_over(self) -> bool:
        """Whether the daemon knows that the session is over. It notices broken connections late."""
        sessions = self.daemon.core.state.tables.sessions
        return self.daemon.process.dead or self.ref.session_id not in sessions

    def _beat(self) -> None:
        process = self._client.process
        if self.over or process.dead:
            return
        world = self._client.world
        if process.stopped_until_ns <= world.now_ns:
            self._beats += 1
            self.say(heartbeat=pb.Heartbeat(sequence=self._beats))
        self.call.responses.clear()
        world.later(HEARTBEAT_S * 10**9, self._beat)

    def say(self, **kind: Any) -> None:
        self.call.send(pb.SessionRequest(**kind))


class SimClient:
    """Performs `steps` in order. When it dies, a new client continues with the remaining ones."""

    def __init__(self, run: Run, name: str, steps: Sequence[Step], life: int = 0) -> None:
        self.run = run
        self.world: World = run.world
        self.oracle = run.oracle
        self.name = name
        self.life = life
        self.steps = list(steps)
        self.done = False
        self.process = Process(self.world, f"{name}.{life}")
        # Half of the clients use a socket on which the kernel reports the peer process.
        number = run.next_pid()
        self.caller = CallerProcess(number, 1000) if number % 2 else None
        self.session: Session | None = None
        #: ended sessions: a client that has not noticed the end continues to read through them
        self._ended: list[Session] = []
        self.random = random.Random(f"{run.plan.seed} {name} {life}")
        self.process.when_dead.append(self._died)
        self.process.spawn("main", self._main)

    def _main(self) -> None:
        while self.steps:
            step = self.steps.pop(0)
            self.random = random.Random(f"{self.run.plan.seed} {step.number}")
            self.world.pass_time(1 + step.args.get("pause_ms", 0) * 1_000_000)
            self.oracle.count(step.kind)
            try:
                self._methods[step.kind](self, step.args)
            except Unreachable:
                self._drop_session()
            except Refused as refused:
                self.oracle.count(f"refused: {refused.error.name}")
                if isinstance(refused.error, UnknownSession | StaleIncarnation):
                    self._drop_session()
        self._drop_session()
        self._let_go()
        self.done = True

    def _died(self) -> None:
        if self.world.unwinding or self.done:
            return
        self.run.clients.remove(self)
        again = partial(SimClient, self.run, self.name, self.steps, self.life + 1)
        self.world.later(1_000_000, lambda: self.run.clients.append(again()))

    # ---- calls

    def wait_response(self, call: Call, patience_s: float = BOUND_S) -> bool:
        """Wait for the next response. False: the call ended without one. Raises Refused and
        Unreachable."""
        if not call.wait(self.world.now_ns + int(patience_s * 1e9)):
            if call.daemon.alive:
                detail = f"{call.method} of {self.name} has no response after {patience_s:g} s"
                self.oracle.fail(promises.BOUND, detail)
            raise Unreachable("no answer")
        if call.responses:
            return True
        if call.error is not None:
            raise call.error
        return False

    def begin(self, daemon: SimDaemon, method: str) -> Call:
        lost = ""
        if self.random.random() < self.run.plan.lost_rate and method != "hand_over":
            lost = self.random.choice(["request", "response", "middle", "patience"])
        call = Call(self.world, daemon, method, caller=self.caller, lost=lost)
        if lost == "patience":
            self.world.later(self.random.randrange(3_000_000), call.hang_up)
        return call

    def ask(self, daemon: SimDaemon, method: str, request: Any, patience_s: float = BOUND_S) -> Any:
        call = self.begin(daemon, method)
        call.send(request)
        if not self.wait_response(call, patience_s):
            raise Unreachable("no answer came")
        response = call.responses.popleft()
        if not call.ended:
            self.wait_response(call, patience_s)
        return response

    def open_session(self) -> Session:
        """Return the open session, or open a new one. Raises Unreachable, Refused."""
        if self.session is not None and (
            self.session.over or self.session.daemon is not self.run.daemon
        ):
            self._drop_session()
        if self.session is None:
            for _ in range(_CONNECT_ATTEMPTS):
                daemon = self.run.daemon
                if daemon.alive and daemon.serving:
                    break
                self.world.pass_time(100_000_000)
            else:
                raise Unreachable("no daemon serves")
            self.session = Session(self, daemon)
        return self.session

    def _drop_session(self) -> None:
        if self.session is not None:
            self._ended.append(self.session)
            self.session.lost = True
            self.session.call.hang_up()
            self.session = None

    def _let_go(self) -> None:
        """Every session was replaced: nothing may keep the memory of its daemon."""
        for session in self._ended:
            kept = [weakref.ref(arena) for arena in session.node.arenas.values()]
            session.node.let_go()
            self.oracle.let_go(sum(arena() is not None for arena in kept))

    def ended_session(self) -> Session | None:
        """A random ended session, preferably with an earlier start of the daemon."""
        earlier = [one for one in self._ended if one.daemon is not self.run.daemon]
        sessions = earlier or self._ended
        return self.random.choice(sessions) if sessions else None

    # ---- reads

    def _claim(
        self, session: Session, keys: Sequence[Key], wait_ms: int
    ) -> tuple[int, list[Entry]]:
        request = pb.ClaimRequest(
            session=session.ref, keys=keys, mode=pb.CLAIM_MODE_ANY, wait_ms=wait_ms
        )
        answer = self.ask(session.daemon, "claim", request)
        found = [
            _entry(key, result.entry)
            for key, result in zip(keys, answer.results, strict=False)
            if result.claimed
        ]
        return answer.claim_id, found

    def _restore(self, args: dict[str, Any]) -> None:
        begun_ns = self.world.now_ns
        keys = [key_of(number) for number in args["keys"]]
        session = (self.ended_session() if args["stale"] else None) or self.open_session()
        claim, index = 0, session.node.index
        if args["claim"] and not session.lost:
            claim, entries = self._claim(session, keys, args["wait_ms"])
        elif index is None:
            return
        else:
            entries = [
                _entry_of_row(key, row)
                for key, row in zip(keys, index.get(keys), strict=True)
                if row
            ]
        if not entries:
            return
        if session.daemon is not self.run.daemon:
            self.oracle.count("read the index of an earlier start")
        if args["stop_in"]:
            process = self.process
            process.stop_at_op = process.ops + args["stop_in"]
            process.stop_for_ns = self.random.choice([1_000_000, 500_000_000, 9_000_000_000])
        buffers = [bytearray(entry.payload_bytes) for entry in entries]
        check = args["check"]
        views = [_divided(buffer, args["pieces"]) for buffer in buffers]
        restore = Restore(Entries(entries), views, "always" if check else "never")
        rest = list(range(len(entries)))
        if args["place"]:
            given_ms = args.get("deadline_ms")
            deadline = LATER
            if given_ms is not None:
                deadline = Deadline(given_ms, clock=lambda: self.world.now_ns / 1e9)
            # What keeps the thread itself from going on is not the reads' fault.
            copied_ns = self.world.now_ns - self.world.current.delayed_ns
            stops = self.process.stops
            copies = session.node.copy(Entries(entries), views, [check] * len(entries), deadline)
            took_ns = self.world.now_ns - self.world.current.delayed_ns - copied_ns
            if given_ms is not None and stops == self.process.stops:
                self.oracle.ended(took_ns - given_ms * 1_000_000 - _LATE_NS)
            rest = restore.copied(copies)
        stopped: MissReason | None = None
        try:
            if rest and claim:
                self._read(session, claim, rest, restore)
        except Refused as refused:
            stopped = MissReason.REFUSED
            restore.read_failed(lost=isinstance(refused.error, ClaimLost))
        except Unreachable:
            stopped = MissReason.UNAVAILABLE
            restore.read_failed(lost=False)
        misses = restore.misses(stopped)
        for entry, buffer, miss in zip(entries, buffers, misses, strict=True):
            good = miss is None
            self.oracle.count(f"restored: {good}")
            if session.daemon is not self.run.daemon:
                self.oracle.count(f"restored from an earlier start: {good}")
            if good:
                self.oracle.read(
                    entry.key,
                    bytes(buffer),
                    incarnation=session.ref.incarnation,
                    generation=entry.generation,
                    checked=check,
                    begun_ns=begun_ns,
                )
        if args.get("deadline_ms"):
            for buffer in buffers:
                self._reuse(buffer)
        if restore.corrupt:
            session.say(suspect=pb.Suspect(keys=restore.corrupt))
        if claim:
            if args["hold_ms"]:
                self.world.pass_time(args["hold_ms"] * 1_000_000)
            self._release(session, claim)

    def _reuse(self, buffer: bytearray) -> None:
        """The call is over: use its buffer for something else, which has to stay."""
        mine = self.random.randbytes(len(buffer))
        buffer[:] = mine
        self.world.later(_LOOK_NS, lambda: self.oracle.kept(bytes(buffer) == mine))

    def _read(self, session: Session, claim: int, numbers: Sequence[int], restore: Restore) -> None:
        request = pb.ReadRequest(
            session=session.ref,
            claim_id=claim,
            ranges=[pb.ReadRange(index=number) for number in numbers],
        )
        call = self.begin(session.daemon, "read")
        call.send(request)
        while self.wait_response(call):
            for part in call.responses.popleft().parts:
                good = part.status == pb.READ_STATUS_OK
                restore(numbers[part.range], part.offset_bytes, part.data if good else None)

    def _release(self, session: Session, claim: int) -> bool:
        request = pb.ReleaseRequest(session=session.ref, claim_ids=[claim])
        answer = self.ask(session.daemon, "release", request)
        return answer.results[0] == pb.RELEASE_STATUS_RELEASED

    def _views(self, args: dict[str, Any]) -> None:
        begun_ns = self.world.now_ns
        session = self.open_session()
        claim, entries = self._claim(session, [key_of(n) for n in args["keys"]], 0)
        if not claim:
            return
        found = session.node.views(Entries(entries))
        if found is None:
            self._release(session, claim)
            return
        views, in_place = found
        read: list[bytes] = []
        self.world.pass_time(1 + args["hold_ms"] * 1_000_000)
        for pieces in views:
            data = b""
            for piece in pieces:
                self.world.operate()
                data += bytes(piece)
            read.append(data)
        stands = in_place.stands(LATER)
        if self._release(session, claim) or stands:
            for entry, data in zip(entries, read, strict=True):
                self.oracle.read(
                    entry.key,
                    data,
                    incarnation=session.ref.incarnation,
                    generation=entry.generation,
                    checked=False,
                    begun_ns=begun_ns,
                )

    def _lookup(self, args: dict[str, Any]) -> None:
        session = self.open_session()
        keys = [key_of(number) for number in args["keys"]]
        request = pb.LookupRequest(keys=keys, wait_ms=args["wait_ms"])
        answer = self.ask(session.daemon, "lookup", request)
        for key, result in zip(keys, answer.results, strict=True):
            if result.presence == pb.PRESENCE_PRESENT:
                crc = self.oracle.generations.get((answer.incarnation, result.entry.generation))
                if crc != result.entry.payload_crc32c:
                    self.oracle.fail(
                        promises.READS,
                        f"a lookup of {key.hex()} returned an entry that was never published",
                    )

    # ---- the rest

    def _forge(self, args: dict[str, Any]) -> None:
        session = self.open_session()
        ref = pb.SessionRef()
        ref.CopyFrom(session.ref)
        ended = self.ended_session()
        if ended is not None and self.random.random() < 0.5 and ended.known_to_be_over:
            ref.CopyFrom(ended.ref)
        else:
            ref.secret = bytes(16)
        item = Item(key=key_of(99), payload_bytes=1, token_count=1)
        header = pb.SaveHeader(
            session=ref, tier=pb.TIER_RAM, reason=pb.SAVE_REASON_COLD, **columns([item])
        )
        request: Any = {
            "claim": pb.ClaimRequest(session=ref, keys=[key_of(0)], mode=pb.CLAIM_MODE_RUN),
            "reserve": pb.ReserveRequest(header=header),
            "save": pb.SaveRequest(header=header),
            "read": pb.ReadRequest(session=ref, claim_id=1, ranges=[pb.ReadRange()]),
            "release": pb.ReleaseRequest(session=ref, claim_ids=[1]),
            "cancel": pb.CancelRequest(session=ref, tokens=[1]),
            "delete": pb.DeleteRequest(session=ref, keys=[key_of(0)]),
        }[args["call"]]
        call = self.begin(session.daemon, args["call"])
        call.send(request)
        if args["call"] == "save":
            call.end()
        try:
            self.wait_response(call)
        except Refused as refused:
            if isinstance(refused.error, UnknownSession | StaleIncarnation):
                return
            raise
        self.oracle.fail(promises.PROOF, f"{args['call']} was accepted")

    def _evict(self, args: dict[str, Any]) -> None:
        session = self.open_session()
        self.ask(session.daemon, "evict", (Tier[args["tier"].upper()], args["entries"]))

    def _resize(self, args: dict[str, Any]) -> None:
        session = self.open_session()
        self.ask(session.daemon, "resize", (Tier[args["tier"].upper()], args["part"]))
        self.oracle.count("resized")

    def _delete(self, args: dict[str, Any]) -> None:
        session = self.open_session()
        keys = [key_of(n) for n in args["keys"]]
        begun = [self.oracle.delete_begins(key) for key in keys]
        answer = self.ask(
            session.daemon, "delete", pb.DeleteRequest(session=session.ref, keys=keys)
        )
        for one, status in zip(begun, answer.results, strict=True):
            self.oracle.count(f"delete: {pb.DeleteStatus.Name(status)}")
            if DeleteStatus(status) in GONE_FOR_EVER:
                self.oracle.deleted(one)

    def _scrub(self, args: dict[str, Any]) -> None:
        session = self.open_session()
        self.ask(session.daemon, "scrub", Tier[args["tier"].upper()])

    def _gc(self, _args: dict[str, Any]) -> None:
        session = self.open_session()
        self.ask(session.daemon, "gc", None)

    def _touch(self, args: dict[str, Any]) -> None:
        keys = [key_of(number) for number in args["keys"]]
        self.open_session().say(touch=pb.Touch(keys=keys))

    def _leave(self, _args: dict[str, Any]) -> None:
        """End the session in order, without releasing its claims and reservations."""
        session = self.open_session()
        session.call.end()
        try:
            while self.wait_response(session.call):
                session.call.responses.popleft()
        finally:
            self._drop_session()

    def _die(self, args: dict[str, Any]) -> None:
        self.process.kill_at_op = self.process.ops + args["ops"]

    def _stop(self, args: dict[str, Any]) -> None:
        self.process.stop_at_op = self.process.ops + args["ops"]
        self.process.stop_for_ns = args["for_ms"] * 1_000_000

    _methods: Final[dict[str, Callable[[SimClient, dict[str, Any]], None]]] = {
        "save": lambda self, args: save(self, self.open_session(), args),
        "restore": _restore,
        "views": _views,
        "lookup": _lookup,
        "forge": _forge,
        "evict": _evict,
        "resize": _resize,
        "gc": _gc,
        "delete": _delete,
        "scrub": _scrub,
        "touch": _touch,
        "leave": _leave,
        "die": _die,
        "stop": _stop,
    }


def _divided(buffer: bytearray, pieces: int) -> FlatBytes:
    """The whole buffer, divided into this many pieces."""
    view = memoryview(buffer)
    size = -(-len(view) // pieces)
    return (
        Pieces([view[at : at + size] for at in range(0, len(view), size)]) if pieces > 1 else view
    )


def _entry(key: Key, info: pb.EntryInfo) -> Entry:
    return Entry(
        key=key,
        tier=Tier(info.tier),
        content=Content(
            info.payload_bytes, info.token_count, info.token_ids_bytes, info.layer_count
        ),
        payload_crc32c=info.payload_crc32c,
        generation=info.generation,
        reason=SaveReason(info.reason),
    )


def _entry_of_row(key: Key, row: bytes) -> Entry:
    """The entry that the library derives from a row of the index."""
    found = unpack_row(row)
    return Entry(
        key=key,
        tier=Tier(found.tier),
        content=found.content,
        payload_crc32c=found.payload_crc32c,
        generation=found.generation,
        reason=SaveReason(found.reason),
    )
