"""Draws the pictures of the documentation from a real daemon under load.

    python -m tests.support.pictures [DIRECTORY]

writes `top.svg` (`prefixctl top`) and, where there is Chromium, `page.png` and `page-dark.png`.
"""

from __future__ import annotations

import io
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path

from rich.console import Console
from rich.text import Text

from prefixd.client import Client
from prefixd.client.ctl.demo import BLOCK_BYTES, BLOCK_TOKENS, PROFILE
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.ctl.views.top import OLDEST_CLAIMS, Interval
from prefixd.client.lab.replayer import LiveOptions, Replayer, keys_of_ids, replay_namespace
from prefixd.client.lab.workloads import generate
from prefixd.proto.vocabulary import Tier
from tests.support.chromium import browser, find_chromium
from tests.support.daemon import metrics_of, private_daemon

BUDGETS = {"ram": "192MiB", "shm": "160MiB", "disk": "256MiB"}
#: By label: the number of requests before they repeat, and the pause between two of them.
TRAFFIC = {"chat-70b": (900, 0.004), "code-14b": (500, 0.010), "embed-2b": (2_000, 0.030)}
#: The pause between two polls of `top`, and the number of polls before the page is drawn.
BETWEEN_S, LOOKS = 4.0, 12


def main(directory: Path) -> None:
    flags = ("--server.metrics=127.0.0.1:0", "--sessions.heartbeat=500ms")
    with private_daemon(*flags, **BUDGETS) as daemon, under_load(daemon.address):
        chromium = find_chromium()
        if chromium is not None:
            draw_page(daemon, chromium, directory)
        else:
            print("Chromium is not installed: the page is not drawn", file=sys.stderr)
        draw_top(daemon, directory / "top.svg")


@contextmanager
def under_load(address: str) -> Iterator[None]:
    """One client for each label, on its own thread, and an engine that holds a claim."""
    stop = threading.Event()
    workers = [threading.Thread(target=work, args=(address, label, stop)) for label in TRAFFIC]
    for worker in workers:
        worker.start()
    try:
        with Client(address, name="engine-0", label="chat-70b") as engine:
            root = replay_namespace(BLOCK_BYTES, BLOCK_TOKENS, "chat-70b").root
            held = keys_of_ids(root, first_ids("chat-70b"))
            while not stop.wait(0.1):
                with engine.longest_run(held, claim=True) as hit:
                    if hit:
                        yield
                        return
    finally:
        stop.set()
        for worker in workers:
            worker.join()


def first_ids(label: str) -> list[int]:
    requests = generate(PROFILE, requests=TRAFFIC[label][0], seed=len(label))
    return list(dict.fromkeys(next(iter(requests)).hash_ids))


def work(address: str, label: str, stop: threading.Event) -> None:
    count, pause_s = TRAFFIC[label]
    options = LiveOptions(
        address=address, tiers=tuple(Tier), block_bytes=BLOCK_BYTES, block_tokens=BLOCK_TOKENS,
        in_place=True, salt=label,
    )  # fmt: skip
    requests = cycle(generate(PROFILE, requests=count, seed=len(label)))
    with Client(address, name=f"worker of {label}", label=label) as client:
        replayer = Replayer(client, options)
        while not stop.wait(pause_s):
            replayer.replay(next(requests))


def draw_page(daemon: PrivateDaemon, chromium: str, directory: Path) -> None:
    with ExitStack() as stack:
        profile = stack.enter_context(tempfile.TemporaryDirectory())
        tab = stack.enter_context(browser(chromium, Path(profile)))
        for name, dark in (("page.png", False), ("page-dark.png", True)):
            tab.size(1080, 700, dark=dark)
            tab.open(f"http://{metrics_of(daemon)}/")
            tab.until(f"Number(document.documentElement?.dataset.looks) >= {LOOKS}")
            tab.draw(directory / name)


def draw_top(daemon: PrivateDaemon, path: Path) -> None:
    board = Interval(daemon.address)
    with daemon.admin() as admin:
        for pause_s in (0.0, BETWEEN_S):
            threading.Event().wait(pause_s)
            board.take(admin.stats(), admin.oldest_claims(OLDEST_CLAIMS), time.monotonic())
    console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ prefixctl top", style="bold"))
    console.print(board)
    path.write_text(console.export_svg(title="prefixd"))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
