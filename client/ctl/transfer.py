"""`prefixctl export` and `import`: the entries of a tier as a stream, and back.

Both are ordinary clients. An export reads under claims, a batch at a time, which counts as a use of
each entry. An import makes ordinary saves, which the daemon may refuse. It skips entries that are
there already, so an interrupted import is continued by running it again.

A stream has the least recently used entries first. Claims and saves count as a use of their last
key first, because that is the leaf of a chain. So each batch is passed in reverse, and the entries
keep their order.
"""

from __future__ import annotations

import os
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, TypeVar

import typer

from ...proto.trust import why_no_source
from ...proto.vocabulary import Tier
from .command import LONG_TIMEOUT_S, Ctl, DiskTierOption
from .failures import ExitCode, exit_if, fail
from .output_files import STDOUT

if TYPE_CHECKING:
    from ..client import Client
    from ..hits import Hit
    from .connection import AdminConnection
    from .entry_stream import Exported, StreamWriter

T = TypeVar("T")

#: The most bytes and entries in one claim or save. The last entry may exceed the bytes.
_BATCH_BYTES: Final = 32 * 2**20
_BATCH_ENTRIES: Final = 256
#: A key and its payload bytes, while a tier is listed.
_LISTED: Final = struct.Struct("<32sQ")
_CALL_MS: Final = round(1e3 * LONG_TIMEOUT_S)
#: The label of the sessions, as `sessions` and `stats` show it.
_LABEL: Final = "prefixctl"

FileArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="A file; - is standard input or output.")
]


@dataclass(slots=True)
class Moved:
    """The result of a transfer."""

    entries: int = 0
    payload_bytes: int = 0
    #: How many entries were not moved, by the reason.
    others: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        return {
            "entries": self.entries,
            "payload_bytes": self.payload_bytes,
            "others": dict(self.others),
        }

    def sentence(self, done: str) -> str:
        from .views.text_tables import size

        rest = "".join(f", {count:,} {why}" for why, count in sorted(self.others.items()))
        return f"{self.entries:,} entries ({size(self.payload_bytes)}) {done}{rest}"


# ---- export


def _opened_privately(name: str, flags: int) -> int:
    """For this user alone: KV state can reveal the prompts that it was computed from."""
    return os.open(name, flags | os.O_CLOEXEC, 0o600)


def export(
    ctl: Ctl,
    file: FileArgument,
    tier: DiskTierOption = Tier.DISK,
    resume: Annotated[
        bool, typer.Option("--resume", help="Append the entries that FILE does not have yet.")
    ] = False,
) -> None:
    """Write the entries of a tier to a file, the least recently used first.

    Each entry is verified before it is written. The daemon keeps serving; entries that it evicts
    meanwhile are left out. Exits 1 when an entry could not be read.
    """
    from .entry_stream import StreamWriter

    if file == STDOUT and (resume or sys.stdout.isatty()):
        fail("--resume takes a file, and a terminal no entries", ExitCode.BAD_INPUT)
    if file == STDOUT and ctl.as_json:
        fail("--json would stand among the entries; write them to a file", ExitCode.BAD_INPUT)
    moved = Moved()
    with _output(file, resume=resume) as (out, known, written):
        writer = StreamWriter(out, *written)
        if not known:
            writer.begin()
        # Entries that the index has no room for are found only by rpc.
        with (
            ctl.connect(LONG_TIMEOUT_S) as daemon,
            _client(ctl) as client,
            _client(ctl, local=False) as remote,
        ):
            _export(daemon, (client, remote), tier, known, writer, moved)
        writer.end()
        out.flush()
        if file != STDOUT:
            os.fsync(out.fileno())
    _show(ctl, moved, "exported", to_stderr=file == STDOUT)
    exit_if(moved.others["unreadable"])


@contextmanager
def _output(file: str, *, resume: bool) -> Iterator[tuple[BinaryIO, set[bytes], tuple[int, int]]]:
    """The file to write to, the keys that it has, and its numbers of records and payload bytes.
    A last record that is not whole is cut off, as is the end of the stream."""
    if file == STDOUT:
        yield sys.stdout.buffer, set(), (0, 0)
        return
    from .entry_stream import MAGIC, BrokenStream, StreamReader

    path = Path(file)
    if path.exists() and path.stat().st_size and not resume:
        fail(f"{path} is there already: --resume goes on with it", ExitCode.BAD_INPUT)
    known: set[bytes] = set()
    try:
        with open(path, "ab+", opener=_opened_privately) as out:  # for the opener
            if why := why_no_source(os.fstat(out.fileno())):
                fail(f"{path} is not written to: {why}", ExitCode.BAD_INPUT)
            out.seek(0)
            reader = StreamReader(out)
            try:
                known.update(entry.key for entry in reader)
            except BrokenStream:
                out.seek(0)
                head = out.read(len(MAGIC))
                if head and not MAGIC.startswith(head) and head != MAGIC:
                    fail(f"{path} is no stream of entries; it stays as it is", ExitCode.BAD_INPUT)
            # A file without a whole record is written anew.
            out.truncate(reader.good_bytes if known else 0)
            out.seek(0, os.SEEK_END)
            yield out, known, (reader.entries, reader.payload_bytes)
    except OSError as problem:
        fail(f"{path}: {(problem.strerror or '').lower()}", ExitCode.PROBLEM)


def _export(
    daemon: AdminConnection,
    clients: Sequence[Client],
    tier: Tier,
    known: set[bytes],
    writer: StreamWriter,
    moved: Moved,
) -> None:
    from ...proto.keys import Key
    from .disk_sort import sorted_on_disk
    from .views.progress import counting

    if known:
        moved.others["there already"] = len(known)
    count = sum(t.entries for t in daemon.stats().tiers if Tier(t.tier) is tier)
    listed = (
        (entry.last_used_unix_ns, 0, _LISTED.pack(entry.key, entry.info.payload_bytes))
        for entry in daemon.all_entries(tier)
        if entry.key not in known
    )
    least_recent = map(_LISTED.unpack, sorted_on_disk(listed))
    counted = counting(least_recent, max(0, count - len(known)), "export")
    for batch in _batches(counted, lambda entry: entry[1]):
        keys = [Key(key) for key, _ in batch]
        for client in clients:
            with client.claim(keys[::-1], deadline_ms=_CALL_MS, counted=False) as hit:
                _put(hit, tier, writer, moved)
                found = set(hit.keys)
            keys = [key for key in keys if key not in found]
            if not keys:
                break
        moved.others["left meanwhile"] += len(keys)
    moved.others += Counter()  # drops zeros


def _put(hit: Hit, tier: Tier, writer: StreamWriter, moved: Moved) -> None:
    from .entry_stream import Exported

    for index, entry in reversed(list(enumerate(hit))):
        if entry.tier is not tier:
            moved.others["left meanwhile"] += 1
            continue
        payload = hit.read(index, deadline_ms=_CALL_MS)
        token_ids = hit.token_ids(index, deadline_ms=_CALL_MS)
        if payload is None or token_ids is None:
            moved.others["unreadable"] += 1
            continue
        writer.put(
            Exported(
                entry.key,
                entry.reason,
                entry.content,
                payload,
                entry.payload_crc32c,
                token_ids,
            )
        )
        moved.entries += 1
        moved.payload_bytes += len(payload)


# ---- import


def import_(ctl: Ctl, file: FileArgument, tier: DiskTierOption = Tier.DISK) -> None:
    """Save the entries of a file that export wrote.

    These are ordinary saves, which evict other entries. Each record is verified before it is saved.
    At a damaged record the import stops, and keeps what it has saved. Entries that are already
    there are skipped, so the same command continues an interrupted import. Exits 1 when something
    was not saved.
    """
    from .entry_stream import BrokenStream, StreamReader

    moved = Moved()
    broken = ""
    with _input(file) as source, _client(ctl) as client:
        if not client.wait_connected(deadline_ms=round(1e3 * (ctl.timeout_s or 10))):
            fail(f"no daemon answers at {ctl.address}", ExitCode.UNREACHABLE)

        def whole_entries() -> Iterator[Exported]:
            nonlocal broken
            try:
                yield from StreamReader(source)
            except BrokenStream as problem:
                broken = str(problem)

        for batch in _batches(whole_entries(), lambda entry: len(entry.payload)):
            _save(client, batch, tier, moved)
    _show(ctl, moved, "imported")
    if broken:
        fail(f"{file}: {broken}", ExitCode.PROBLEM)
    exit_if(set(moved.others) - {"there already"})


@contextmanager
def _input(file: str) -> Iterator[BinaryIO]:
    if file == STDOUT:
        yield sys.stdin.buffer
        return
    try:
        source = Path(file).open("rb")  # noqa: SIM115  # only its errors are bad input
    except OSError as problem:
        fail(f"{file}: {(problem.strerror or '').lower()}", ExitCode.BAD_INPUT)
    with source:
        if why := why_no_source(os.fstat(source.fileno())):
            fail(
                f"{file} is not believed, because it could hold any state under each key: {why}. "
                f"If you know what is in it: prefixctl import - < {file}",
                ExitCode.BAD_INPUT,
            )
        yield source


def _save(client: Client, batch: Sequence[Exported], tier: Tier, moved: Moved) -> None:
    """Save entries in the order of the stream. An entry that found no room in its batch is saved
    again alone: single entries may fit where the whole batch exceeds its share of the tier."""
    from ...proto.vocabulary import SaveStatus
    from ..saves import item_of

    present = client.exists([entry.key for entry in batch], counted=False)
    missing = [entry for entry, is_present in zip(batch, present, strict=True) if not is_present]
    moved.others["there already"] += len(batch) - len(missing)
    groups = [list(group) for _, group in groupby(missing, key=lambda entry: entry.reason)]
    while groups:
        group = groups.pop(0)
        items = [
            item_of(entry.key, entry.payload, entry.content, entry.token_ids)
            for entry in reversed(group)
        ]
        saved = client.save_many(items, tier=tier, reason=group[0].reason, deadline_ms=_CALL_MS)
        again: list[list[Exported]] = []
        for entry, outcome in zip(group, reversed(saved), strict=True):
            if outcome.status is SaveStatus.SAVED:
                moved.entries += 1
                moved.payload_bytes += len(entry.payload)
            elif outcome.status is SaveStatus.PRESENT:
                moved.others["there already"] += 1
            elif outcome.status is SaveStatus.NO_ROOM and len(group) > 1:
                again.append([entry])
            else:
                moved.others[outcome.status.label.replace("_", " ")] += 1
        groups[:0] = again
    moved.others += Counter()


# ---- both


def _batches(items: Iterable[T], payload_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    batch: list[T] = []
    size_bytes = 0
    for item in items:
        batch.append(item)
        size_bytes += payload_bytes(item)
        if size_bytes >= _BATCH_BYTES or len(batch) == _BATCH_ENTRIES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _client(ctl: Ctl, *, local: bool = True) -> Client:
    from ..client import Client

    return Client(ctl.address, name="prefixctl", label=_LABEL, local=local)


def _show(ctl: Ctl, moved: Moved, done: str, *, to_stderr: bool = False) -> None:
    if to_stderr:
        typer.echo(moved.sentence(done), err=True)
    else:
        ctl.show(moved.as_dict(), lambda: moved.sentence(done))
