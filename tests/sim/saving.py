"""How simulated clients save: over streams and staging memory, well-behaved or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.proto.vocabulary import SaveReason, Tier
from tests.sim.daemon import STALL_S, TTL_S
from tests.sim.network import Call
from tests.sim.oracle import key_of
from tests.support.columns import Item, StagedPart, columns, staged

if TYPE_CHECKING:
    from tests.sim.client import Session, SimClient

_PART_BYTES: Final = 6000


def save(client: SimClient, session: Session, args: dict[str, Any]) -> None:
    """Perform one save step of a client."""
    _Save(client, session).go(args)


class _Save:
    def __init__(self, client: SimClient, session: Session) -> None:
        self.client = client
        self.session = session
        self._together, self._quiet = 1, False
        self._wrong: bytes | None = None

    def go(self, args: dict[str, Any]) -> None:
        session = self.session
        payloads = [
            (key_of(number), self.client.random.randbytes(size))
            for number, size in zip(args["keys"], args["sizes"], strict=True)
        ]
        behaves = args["behaves"]
        for key, payload in payloads:
            self.client.oracle.attempted(key, payload)
        header = pb.SaveHeader(
            session=session.ref,
            tier=Tier[args["tier"].upper()].value,
            reason=SaveReason.FINISH.value,
            **columns(Item(key, len(payload), 16) for key, payload in payloads),
            wait_ms=args["wait_ms"],
        )
        if behaves == "wrong crc":
            # The last payload does not match its checksum, so it was not honestly sent.
            key, self._wrong = payloads[-1]
            del self.client.oracle.attempts[key][crc32c(self._wrong)]
        how: dict[str, Callable[..., Sequence[tuple[int, pb.SaveResult]] | None]] = {
            "save": self._save_stream,
            "save_whole": self._save_whole,
            "write": self._save_reserved,
            "staged": self._save_staged,
        }
        self._together, self._quiet = args["together"], args["quiet"]
        results = how[args["how"]](session, header, payloads, behaves)
        for number, result in results or ():
            self.client.oracle.count(f"save: {pb.SaveStatus.Name(result.status)}")
            if result.status == pb.SAVE_STATUS_SAVED:
                key, payload = payloads[number]
                self.client.oracle.acknowledged(key, payload, session.ref.incarnation)

    def _grouped(self, parts: Sequence[Any]) -> Iterable[Sequence[Any]]:
        """The parts, grouped into messages."""
        return (parts[at : at + self._together] for at in range(0, len(parts), self._together))

    def _crc(self, payload: bytes) -> int:
        return crc32c(payload) ^ (payload is self._wrong)

    def _parts(self, payloads: Sequence[tuple[Key, bytes]], behaves: str) -> Iterable[pb.WritePart]:
        """The parts of all payloads in order. `short` omits the last byte of each payload."""
        for number, (_, payload) in enumerate(payloads):
            for start in range(0, len(payload), _PART_BYTES):
                data = payload[start : start + _PART_BYTES]
                last = start + _PART_BYTES >= len(payload)
                if behaves == "short" and last:
                    data = data[:-1]
                part = pb.WritePart(item=number, offset_bytes=start, data=data, last=last)
                if last:
                    part.payload_crc32c = self._crc(payload)
                yield part

    def _stream(
        self, call: Call, messages: Iterable[Any], behaves: str
    ) -> Iterable[tuple[int, pb.SaveResult]]:
        """Send the messages. Returns (item number, result) pairs."""
        for number, message in enumerate(messages):
            call.send(message)
            self.client.world.operate(50_000)
            if number and behaves == "stalls":
                self.client.world.pass_time(int(1.5 * STALL_S * 1e9))
            if behaves == "leaves":
                self.client.world.pass_time(self.client.random.randrange(3_000_000))
                call.hang_up()
                return []
        call.end()
        if not self.client.wait_response(call):
            return []
        response = call.responses.popleft()
        return enumerate(response.results)

    def _save_stream(
        self, session: Session, header: Any, payloads: Any, behaves: str
    ) -> Iterable[tuple[int, pb.SaveResult]]:
        call = self.client.begin(session.daemon, "save")
        parts = list(self._parts(payloads, behaves))
        messages = [pb.SaveRequest(header=header)]
        messages += [pb.SaveRequest(parts=some) for some in self._grouped(parts)]
        return self._stream(call, messages, behaves)

    def _save_whole(
        self, session: Session, header: Any, payloads: Any, behaves: str
    ) -> Iterable[tuple[int, pb.SaveResult]]:
        call = self.client.begin(session.daemon, "save")
        parts = self._parts(payloads, behaves)
        return self._stream(call, [pb.SaveRequest(header=header, parts=parts)], behaves)

    def _save_reserved(
        self, session: Session, header: Any, payloads: Any, behaves: str
    ) -> Iterable[tuple[int, pb.SaveResult]]:
        answer = self.client.ask(session.daemon, "reserve", pb.ReserveRequest(header=header))
        granted = [
            (number, result.token)
            for number, result in enumerate(answer.results)
            if result.status == pb.RESERVE_STATUS_GRANTED
        ]
        if not granted:
            return []
        if behaves == "cancels":
            tokens = [token for _, token in granted]
            request = pb.CancelRequest(session=session.ref, tokens=tokens)
            self.client.ask(session.daemon, "cancel", request)
            return []
        if behaves == "leaves":
            return []
        if behaves == "stalls":
            self.client.world.pass_time(int(1.2 * TTL_S * 1e9))
        numbers = [number for number, _ in granted]
        to_write = [payloads[number] for number, _ in granted]
        parts = list(self._parts(to_write, behaves))
        messages = [pb.SaveRequest(parts=some) for some in self._grouped(parts)]
        reserved = pb.GrantedReservations(
            session=session.ref, tokens=[token for _, token in granted]
        )
        messages[0].reserved.CopyFrom(reserved)
        call = self.client.begin(session.daemon, "save")
        for message in messages:
            call.send(message)
            self.client.world.operate(50_000)
        call.end()
        if not self.client.wait_response(call):
            return []
        response = call.responses.popleft()
        return list(zip(numbers, response.results, strict=True))

    def _save_staged(
        self, session: Session, header: Any, payloads: Any, behaves: str
    ) -> Iterable[tuple[int, pb.SaveResult]]:
        staging = session.staging
        if staging is None:
            return self._save_stream(session, header, payloads, behaves)
        call = self.client.begin(session.daemon, "save_staged")
        call.send(pb.SaveStagedRequest(header=header))
        offset = 0
        parts: list[StagedPart] = []
        for number, (_, payload) in enumerate(payloads):
            staging[offset : offset + len(payload)] = payload
            length = len(payload) - (behaves == "short" and len(payload) > 1)
            part = StagedPart(
                item=number,
                staging_offset_bytes=offset,
                length_bytes=length,
                last=True,
                payload_crc32c=self._crc(payload),
            )
            parts.append(part)
            if len(parts) >= self._together or number == len(payloads) - 1:
                call.send(pb.SaveStagedRequest(**staged(parts), quiet=self._quiet))
                parts = []
            self.client.world.operate(50_000)
            if behaves == "scribbles":
                self.client.world.pass_time(self.client.random.randrange(1_000_000))
                place = offset + self.client.random.randrange(len(payload))
                staging[place] ^= 1
            offset += len(payload)
        if behaves == "leaves":
            call.hang_up()
            return []
        if behaves == "stalls":
            self.client.world.pass_time(int(1.5 * STALL_S * 1e9))
        call.send(pb.SaveStagedRequest(last=True))
        results: list[pb.SaveResult] = []
        while not results and self.client.wait_response(call):
            response = call.responses.popleft()
            results = list(response.results)
            if response.all_saved:
                results = [pb.SaveResult(status=pb.SAVE_STATUS_SAVED)] * response.all_saved
        return enumerate(results)
