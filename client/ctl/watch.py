"""`prefixctl watch`, which follows the keys of a daemon, and `publish-kv-events`, which publishes
them to other projects' indexers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from ...proto.vocabulary import Tier
from .command import Ctl, TiersOption, chosen, print_json
from .failures import ExitCode, fail

if TYPE_CHECKING:
    from ..watch import Watch, WatchEvent


def watch(
    ctl: Ctl,
    tier: TiersOption = None,
    until_synced: Annotated[
        bool, typer.Option("--once", help="Exit after listing what is there.")
    ] = False,
) -> None:
    """List the keys that are there, then follow what is saved and evicted, until interrupted.

    With --json, one object per line. Reconnects to a daemon that was restarted.
    """
    from ..watch import Synced

    with _open_watch(ctl, tier) as watching:
        for event in _first_answered(watching):
            if ctl.as_json:
                print_json(as_dict(event), indent=None)
            else:
                typer.echo(line_of(event))
            if until_synced and isinstance(event, Synced):
                return


class Encoding(Enum):
    """How an event is encoded in msgpack."""

    MAP = "map"
    ARRAY = "array"


def publish_kv_events(
    ctl: Ctl,
    bind: Annotated[
        str, typer.Option(help="Where subscribers connect: tcp://HOST:PORT or ipc://PATH.")
    ] = "tcp://127.0.0.1:5557",
    replay: Annotated[
        str | None,
        typer.Option(help="Where subscribers ask for missed messages (default: nowhere)."),
    ] = None,
    topic: Annotated[
        str, typer.Option(help="The topic of every message; llm-d expects kv@POD@MODEL.")
    ] = "",
    tier: TiersOption = None,
    namespace: Annotated[
        str | None, typer.Option(help="Only entries that clients with this label saved.")
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Only entries with this number of tokens.")
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="The data-parallel rank in the messages.")] = 0,
    buffer: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="How many messages are kept for a replay.")
    ] = 10_000,
    encoding: Annotated[
        Encoding,
        typer.Option(
            help="The encoding of events: map as in vLLM 0.33, array as in older versions."
        ),
    ] = Encoding.MAP,
) -> None:
    """Publish which blocks are there to vLLM's indexers (llm-d, Dynamo), in vLLM's format over ZMQ.

    Publishes entries that were saved with their token ids, each after the block before it. Needs
    pyzmq and msgspec, which prefixd's extra kv-events installs.
    """
    try:
        from .kv_events import Blocks, Publisher
    except ImportError as problem:
        fail(
            f"KV events need more than is installed ({problem}): pip install pyzmq msgspec",
            ExitCode.BAD_INPUT,
        )
    from ..watch import Disconnected, Synced

    blocks = Blocks(block_tokens=block_tokens, namespace=namespace)
    with (
        _open_watch(ctl, tier, token_ids=True) as watching,
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


def _open_watch(ctl: Ctl, tiers: list[Tier] | None, *, token_ids: bool = False) -> Watch:
    from ..watch import Watch

    return Watch(ctl.address, tiers=chosen(tiers), token_ids=token_ids, operators=ctl.admin_address)


def _first_answered(watching: Watch) -> Iterator[WatchEvent]:
    """The events. Raises DaemonUnavailable if the first attempt to connect fails."""
    from ...proto.errors import DaemonUnavailable
    from ..watch import Disconnected

    for number, event in enumerate(watching):
        if not number and isinstance(event, Disconnected):
            raise DaemonUnavailable(
                f"the daemon at {watching.address} can't be watched: {event.why}"
            )
        yield event


def as_dict(event: WatchEvent) -> dict[str, object]:
    """An event for JSON. Keys and token ids are hexadecimal, tiers and reasons are names."""
    found: dict[str, object] = {"event": type(event).__name__.lower()}
    for name, value in dataclasses.asdict(event).items():
        if isinstance(value, bytes):
            value = value.hex()
        elif isinstance(value, Enum):
            value = value.name.lower()
        found[name] = value
    return found


def line_of(event: WatchEvent) -> str:
    """An event as a line for people."""
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
