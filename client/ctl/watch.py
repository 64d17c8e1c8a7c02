"""`prefixctl watch`: which keys a daemon has, as it happens; and `publish-kv-events`, which tells
the indexers of others."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from ...proto.vocabulary import Tier
from .admin import LOOK
from .command import Ctl, ExitCode, command, fail, print_json
from .options import TiersOption, chosen

if TYPE_CHECKING:
    from ..watch import Watch, WatchEvent


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(app, "watch", panel=LOOK)(watch)
    command(app, "publish-kv-events", panel=LOOK)(publish_kv_events)


def watch(
    ctl: Ctl,
    tier: TiersOption = None,
    until_synced: Annotated[
        bool, typer.Option("--once", help="Stop when everything that there is has been told.")
    ] = False,
) -> None:
    """Tell which keys are there, and then what comes and goes, until it is interrupted.

    With --json an object a line. A daemon that is started again is found again.
    """
    from ..watch import Synced

    with open_watch(ctl, tier) as watching:
        for event in answered(watching):
            if ctl.as_json:
                print_json(as_dict(event), indent=None)
            else:
                typer.echo(line_of(event))
            if until_synced and isinstance(event, Synced):
                return


class Encoding(Enum):
    """How an event is written in msgpack."""

    MAP = "map"
    ARRAY = "array"


def publish_kv_events(
    ctl: Ctl,
    bind: Annotated[
        str, typer.Option(help="Where subscribers connect: tcp://HOST:PORT or ipc://PATH.")
    ] = "tcp://127.0.0.1:5557",
    replay: Annotated[
        str | None, typer.Option(help="Where they ask for what they missed. Default: nowhere.")
    ] = None,
    topic: Annotated[str, typer.Option(help="Of every message; llm-d wants kv@POD@MODEL.")] = "",
    tier: TiersOption = None,
    namespace: Annotated[
        str | None, typer.Option(help="Only what clients with this label saved.")
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Only entries with this number of tokens.")
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="The data-parallel rank that is told.")] = 0,
    buffer: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Messages that can be asked for again.")
    ] = 10_000,
    encoding: Annotated[
        Encoding,
        typer.Option(help="How events are written: as maps by vLLM 0.33, as arrays by older ones."),
    ] = Encoding.MAP,
) -> None:
    """Tell vLLM's indexers (llm-d, Dynamo) which blocks are there, in vLLM's own format over ZMQ.

    Told are entries that were saved with their token ids, behind the blocks before them. Needs
    pyzmq and msgspec, which prefixd's extra kv-events installs.
    """
    try:
        from .kv_events import Blocks, Publisher
    except ImportError as problem:
        fail(
            f"KV events need pyzmq and msgspec: pip install 'prefixd[kv-events]' ({problem})",
            ExitCode.BAD_INPUT,
        )
    from ..watch import Disconnected, Synced

    blocks = Blocks(block_tokens=block_tokens, namespace=namespace)
    with (
        open_watch(ctl, tier, token_ids=True) as watching,
        Publisher(
            bind, replay, topic, rank=rank, buffer=buffer, as_map=encoding is Encoding.MAP
        ) as publisher,
    ):
        typer.echo(f"KV events at {publisher.bound}", err=True)
        for events in watching.batches():
            publisher.publish(blocks.translated(events))
            for event in events:
                if isinstance(event, Disconnected):
                    typer.echo(line_of(event), err=True)
                elif isinstance(event, Synced):
                    typer.echo(
                        f"{line_of(event)}; not told: {blocks.without_ids:,} entries without token "
                        f"ids, {blocks.without_parent:,} of an unknown place in their chain",
                        err=True,
                    )


def open_watch(ctl: Ctl, tiers: list[Tier] | None, *, token_ids: bool = False) -> Watch:
    """A watch of the daemon that the command is for."""
    from ...proto.endpoints import ADMIN_ADDRESS_VARIABLE, normalize_address
    from ..watch import Watch

    given = os.environ.get(ADMIN_ADDRESS_VARIABLE)
    return Watch(
        ctl.address,
        tiers=chosen(tiers),
        token_ids=token_ids,
        operators=normalize_address(given) if given else None,
    )


def answered(watching: Watch) -> Iterator[WatchEvent]:
    """Its events. Raises DaemonUnavailable if nobody answers at first."""
    from ...proto.errors import DaemonUnavailable
    from ..watch import Disconnected

    heard = False
    for event in watching:
        if not heard and isinstance(event, Disconnected):
            raise DaemonUnavailable(f"nobody can be watched at {watching.address}: {event.why}")
        heard = True
        yield event


def as_dict(event: WatchEvent) -> dict[str, object]:
    """For JSON: keys and token ids in hexadecimal, tiers and reasons by name."""
    found: dict[str, object] = {"event": type(event).__name__.lower()}
    for name, value in dataclasses.asdict(event).items():
        if isinstance(value, bytes):
            value = value.hex()
        elif isinstance(value, Enum):
            value = value.name.lower()
        found[name] = value
    return found


def line_of(event: WatchEvent) -> str:
    """For people."""
    from ..watch import Cleared, Disconnected, Evicted, Published, Synced

    match event:
        case Published():
            return (
                f"+ {event.key.hex()} {event.tier.label:4} {event.token_count:,} tokens, "
                f"{event.payload_bytes:,} bytes"
            )
        case Evicted():
            return f"- {event.key.hex()} {event.tier.label}"
        case Cleared():
            return f"everything that is there follows{event.why and f' ({event.why})'}"
        case Synced():
            return f"that is all until now (event {event.sequence:,})"
        case Disconnected():
            return f"the daemon is not there: {event.why}"
