"""`prefixctl export` and `import`: the entries of a tier as a stream, and back.

Both are clients like any other. An export reads under claims, a batch at a time, and counts as a
use of each entry. An import saves, with everything that a save may be refused for. What is there
already is not saved again, so an import that broke off goes on when it is repeated.

A stream has what was least recently used first. Claims and saves use the last of their keys first,
as the leaf of a chain: so each batch is named backwards, and the order stays what it was.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import typer

from ...proto.vocabulary import Tier
from .admin import CHANGE, LOOK
from .command import Ctl, ExitCode, command, fail
from .options import LONG_TIMEOUT_S, DiskTierOption

if TYPE_CHECKING:
    from ..client import Client
    from ..hits import Hit
    from .connection import AdminConnection
    from .entry_stream import Exported, StreamWriter

#: What is claimed, or saved, at once: bytes, which one more entry may exceed, and entries.
_BATCH_BYTES: Final = 32 * 2**20
_BATCH_ENTRIES: Final = 256
_CALL_MS: Final = round(1e3 * LONG_TIMEOUT_S)
_PIPE: Final = "-"
#: The label of its sessions, as `sessions` and `stats` show it.
_LABEL: Final = "prefixctl"

FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="`-`: standard input or output.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(app, "export", panel=LOOK)(export)
    command(app, "import", panel=CHANGE)(import_)


@dataclass(slots=True)
class Moved:
    """What a transfer came to."""

    entries: int = 0
    payload_bytes: int = 0
    #: by why not
    others: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        return {
            "entries": self.entries,
            "payload_bytes": self.payload_bytes,
            "others": dict(self.others),
        }

    def sentence(self, done: str) -> str:
        from .render import size

        rest = "".join(f", {count:,} {why}" for why, count in sorted(self.others.items()))
        return f"{self.entries:,} entries ({size(self.payload_bytes)}) {done}{rest}"


# ---- export


def export(
    ctl: Ctl,
    file: FileArgument,
    tier: DiskTierOption = Tier.DISK,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on behind what FILE has, and leave that out.")
    ] = False,
) -> None:
    """Write the entries of a tier to a file, the least recently used first.

    Each is verified before it is written. The daemon goes on serving; what leaves meanwhile is left
    out. Exits 1 when something could not be read.
    """
    from .entry_stream import StreamWriter

    if file == _PIPE and (resume or sys.stdout.isatty()):
        fail("--resume takes a file, and a terminal no entries", ExitCode.BAD_INPUT)
    if file == _PIPE and ctl.as_json:
        fail("--json would stand among the entries; write them to a file", ExitCode.BAD_INPUT)
    moved = Moved()
    with _output(file, resume=resume) as (out, known, written):
        writer = StreamWriter(out, *written)
        if not known:
            writer.begin()
        # What the index has no room for is found by asking only.
        with (
            ctl.connect(LONG_TIMEOUT_S) as daemon,
            _client(ctl) as client,
            _client(ctl, local=False) as asking,
        ):
            _export(daemon, (client, asking), tier, known, writer, moved)
        writer.end()
        out.flush()
        if file != _PIPE:
            os.fsync(out.fileno())
    _show(ctl, moved, "exported", to_stderr=file == _PIPE)
    if moved.others["unreadable"]:
        raise typer.Exit(ExitCode.PROBLEM)


@contextmanager
def _output(file: str, *, resume: bool) -> Iterator[tuple[BinaryIO, set[bytes], tuple[int, int]]]:
    """Where to write, the keys that are there already, and how many records and payload bytes. A
    record that is not whole, and the end, are cut off."""
    if file == _PIPE:
        yield sys.stdout.buffer, set(), (0, 0)
        return
    from .entry_stream import MAGIC, BrokenStream, StreamReader

    path = Path(file)
    if path.exists() and path.stat().st_size and not resume:
        fail(f"{path} is there already: --resume goes on with it", ExitCode.BAD_INPUT)
    known: set[bytes] = set()
    try:
        with path.open("ab+") as out:
            out.seek(0)
            reader = StreamReader(out)
            try:
                known.update(entry.key for entry in reader)
            except BrokenStream:
                out.seek(0)
                head = out.read(len(MAGIC))
                if head and not MAGIC.startswith(head) and head != MAGIC:
                    fail(f"{path} is no stream of entries; it stays as it is", ExitCode.BAD_INPUT)
            # A file that has nothing whole begins anew.
            out.truncate(reader.good_bytes if known else 0)
            out.seek(0, os.SEEK_END)
            yield out, known, (reader.entries, reader.payload_bytes)
    except OSError as problem:
        fail(f"{path}: {problem.strerror}", ExitCode.PROBLEM)


def _export(
    daemon: AdminConnection,
    clients: Sequence[Client],
    tier: Tier,
    known: set[bytes],
    writer: StreamWriter,
    moved: Moved,
) -> None:
    from .progress import counting

    listed = [
        (entry.last_used_unix_ns, entry.key, entry.info.payload_bytes)
        for entry in daemon.all_entries(tier)
        if entry.key not in known
    ]
    if known:
        moved.others["there already"] = len(known)
    listed.sort()
    for keys in _batches(counting(listed, len(listed), "export")):
        for client in clients:
            with client.claim(keys[::-1], deadline_ms=_CALL_MS) as hit:
                _put(hit, tier, writer, moved)
                found = set(hit.keys)
            keys = [key for key in keys if key not in found]
            if not keys:
                break
        moved.others["left meanwhile"] += len(keys)
    moved.others += Counter()  # no zeros


def _batches(listed: Iterable[tuple[int, bytes, int]]) -> Iterator[list[Any]]:
    keys: list[bytes] = []
    size_bytes = 0
    for _, key, payload_bytes in listed:
        keys.append(key)
        size_bytes += payload_bytes
        if size_bytes >= _BATCH_BYTES or len(keys) == _BATCH_ENTRIES:
            yield keys
            keys, size_bytes = [], 0
    if keys:
        yield keys


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
                entry.token_count,
                entry.layer_count,
                payload,
                entry.payload_crc32c,
                token_ids,
            )
        )
        moved.entries += 1
        moved.payload_bytes += len(payload)


# ---- import


def import_(ctl: Ctl, file: FileArgument, tier: DiskTierOption = Tier.DISK) -> None:
    """Save the entries of a file that `export` wrote.

    They are ordinary saves, and evict what these would. Each record is verified before it is saved:
    where the stream is broken it is refused, and what came before it stays. What is there already
    is left out, so the same command goes on after a break. Exits 1 when something was not saved.
    """
    from .entry_stream import BrokenStream, StreamReader

    moved = Moved()
    broken = ""
    with _input(file) as source, _client(ctl) as client:
        if not client.wait_connected(deadline_ms=round(1e3 * (ctl.timeout_s or 10))):
            fail(f"no daemon answers at {ctl.address}", ExitCode.UNREACHABLE)
        batch: list[Exported] = []
        size_bytes = 0
        try:
            for entry in StreamReader(source):
                batch.append(entry)
                size_bytes += len(entry.payload)
                if size_bytes >= _BATCH_BYTES or len(batch) == _BATCH_ENTRIES:
                    _save(client, batch, tier, moved)
                    batch, size_bytes = [], 0
        except BrokenStream as problem:
            broken = str(problem)
        _save(client, batch, tier, moved)
    _show(ctl, moved, "imported")
    if broken:
        fail(f"{file}: {broken}", ExitCode.PROBLEM)
    if set(moved.others) - {"there already"}:
        raise typer.Exit(ExitCode.PROBLEM)


@contextmanager
def _input(file: str) -> Iterator[BinaryIO]:
    if file == _PIPE:
        yield sys.stdin.buffer
        return
    try:
        source = Path(file).open("rb")  # noqa: SIM115  # the caller's sentence is for this alone
    except OSError as problem:
        fail(f"{file}: {problem.strerror}", ExitCode.BAD_INPUT)
    with source:
        yield source


def _save(client: Client, batch: Sequence[Exported], tier: Tier, moved: Moved) -> None:
    """In the order of the stream. What the daemon has no room for now is asked for once more,
    alone: of a batch that is larger than a share of the tier single ones fit."""
    from ...proto.vocabulary import SaveStatus
    from ..saves import SaveItem

    if not batch:
        return
    there = client.exists([entry.key for entry in batch])
    missing = [entry for entry, is_there in zip(batch, there, strict=True) if not is_there]
    moved.others["there already"] += len(batch) - len(missing)
    groups: list[list[Exported]] = []
    for entry in missing:
        if groups and groups[-1][0].reason == entry.reason:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    while groups:
        group = groups.pop(0)
        items = [
            SaveItem(
                entry.key,
                entry.payload,
                entry.token_count or None,
                entry.layer_count,
                entry.token_ids or None,
            )
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


def _client(ctl: Ctl, *, local: bool = True) -> Client:
    from ..client import Client

    return Client(ctl.address, name="prefixctl", label=_LABEL, local=local)


def _show(ctl: Ctl, moved: Moved, done: str, *, to_stderr: bool = False) -> None:
    if to_stderr:
        typer.echo(moved.sentence(done), err=True)
    else:
        ctl.show(moved.as_dict(), lambda: moved.sentence(done))
