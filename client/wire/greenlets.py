"""gRPC in a process that gevent has patched.

With threads that are greenlets, gRPC waits for ever unless it is told so: every call would be a
miss. With sockets that switch greenlets and threads that do not (`patch_all(thread=False)`), two
greenlets of one thread wait for each other's lock for ever, which nothing here could mend.
"""

from __future__ import annotations

import logging
import sys

from ...proto.errors import CallerError

logger = logging.getLogger("prefixd.client")


def prepare_grpc() -> None:
    """Have gRPC use gevent's loop, if gevent has patched threads here. Raises CallerError if it has
    patched sockets alone."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is None:
        return
    threads, sockets = (monkey.is_module_patched(name) for name in ("threading", "socket"))
    if not threads:
        if sockets:
            raise CallerError(
                "gevent has patched sockets, but not threads: use gevent.monkey.patch_all() as it "
                "is, or leave sockets alone with patch_all(socket=False, thread=False)"
            )
        return
    from grpc._cython import cygrpc  # type: ignore[attr-defined]  # it has no stubs

    if not getattr(cygrpc, "g_gevent_activated", False):
        from grpc.experimental import gevent

        gevent.init_gevent()
        logger.info("gRPC uses the loop of gevent from now on")


def sockets_switch() -> bool:
    """Whether sockets switch greenlets here instead of blocking their thread: then the kernel
    can't watch their deadlines."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("socket"))
