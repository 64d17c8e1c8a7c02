"""Behaviour of gRPC itself that tests have to allow for, shown without the daemon.

    python -m tests.support.grpc_alone

refuses calls at their first message while the client still sends, and prints how many of them ended
with the server's status and how many with an error of the client's own. It also prints whether a
client learns that a stream was cut off at its first response, with the initial metadata sent
before that response or with it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

MIB = 2**20
CALLS = 100
#: Enough time for a client on the same machine.
HEARD_WITHIN_S = 3.0


@asynccontextmanager
async def served(**handlers: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server that has only these methods, in the service "Shown"."""
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/s"
        server = grpc.aio.server()
        generic = grpc.method_handlers_generic_handler("Shown", handlers)
        server.add_generic_rpc_handlers((generic,))
        server.add_insecure_port(address)
        await server.start()
        try:
            # Keeps the flow-control window small, so that little is sent to a client that does
            # not read.
            options = [("grpc.http2.bdp_probe", 0)]
            async with grpc.aio.insecure_channel(address, options=options) as channel:
                yield channel
        finally:
            await server.stop(None)


async def refused_while_sending(calls: int = CALLS) -> Counter[str]:
    """How calls end that are refused at their first message while the client sends a large one."""

    async def refuse(requests: AsyncIterator[bytes], context: Any) -> None:
        await anext(requests)
        await context.abort(grpc.StatusCode.NOT_FOUND, "no")

    async def messages() -> AsyncIterator[bytes]:
        for message in (b"first", bytes(3 * MIB), b"last"):
            yield message

    ends: Counter[str] = Counter()
    async with served(Refuse=grpc.stream_unary_rpc_method_handler(refuse)) as channel:
        for _ in range(calls):
            try:
                await channel.stream_unary("/Shown/Refuse")(messages())
            except grpc.aio.AioRpcError as error:
                ends[f"{error.code().name}: {error.details()}"] += 1
    return ends


async def cut_off_at_the_first_response(*, begun: bool) -> str:
    """How a stream ends whose first response was cut off. `begun`: the server sent its initial
    metadata before that response."""
    cut = asyncio.Event()

    async def cut_off(_request: bytes, context: Any) -> None:
        if begun:
            await context.send_initial_metadata(())
        writing = asyncio.ensure_future(context.write(bytes(MIB)))
        await asyncio.wait([writing], timeout=0.1)
        writing.cancel()
        cut.set()
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "took nothing")

    async with served(CutOff=grpc.unary_stream_rpc_method_handler(cut_off)) as channel:
        call = channel.unary_stream("/Shown/CutOff")(b"")
        await cut.wait()
        try:
            async with asyncio.timeout(HEARD_WITHIN_S):
                while await call.read() is not grpc.aio.EOF:
                    pass
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except TimeoutError:
            return f"nothing was heard for {HEARD_WITHIN_S:g} s"
        return "all of it"


def main(say: Callable[[str], None] = print) -> None:
    say(f"gRPC {grpc.__version__}")
    for end, calls in asyncio.run(refused_while_sending()).most_common():
        say(f"refused while sending, {calls} of {CALLS}: {end}")
    for begun in (False, True):
        end = asyncio.run(cut_off_at_the_first_response(begun=begun))
        say(f"cut off at the first response, begun {'before it' if begun else 'with it'}: {end}")


if __name__ == "__main__":
    main()
