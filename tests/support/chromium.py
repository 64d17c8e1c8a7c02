"""A headless Chromium, driven over a pipe: sets a page's size, reads its log, takes screenshots."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

#: Only a failing test waits this long.
_WITHIN_S: Final = 90.0
#: Chromium reads commands from descriptor 3 and writes to descriptor 4.
_AS_3_AND_4: Final = (
    "import os, sys; from fcntl import F_DUPFD, fcntl; "
    "r, w = (fcntl(int(n), F_DUPFD, 10) for n in sys.argv[1:3]); "
    "os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_LOGGED: Final = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


def find_chromium() -> str | None:
    """The path of the browser, if one is installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


class Browser:
    """A browser with one tab."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._buffer = b""
        self._last = 0
        self._session = ""
        #: what the page wrote to the console, failed requests and exceptions included
        self.logged: list[str] = []

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the DevTools protocol."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + _WITHIN_S
        while True:
            answer = self._next(deadline_s)
            if answer.get("id") == self._last:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") in _LOGGED:
                self.logged.append(json.dumps(answer["params"]))

    def _next(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reading], [], [], deadline_s - time.monotonic())
            assert ready, "Chromium does not answer"
            piece = os.read(self._reading, 2**16)
            assert piece, "Chromium ended"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the page in CSS pixels. A narrow page is that of a phone."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 700,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """Evaluate the expression until it is true, and return its value."""
        deadline_s = time.monotonic() + _WITHIN_S
        while time.monotonic() < deadline_s:
            if value := self.evaluate(expression):
                return value
        raise AssertionError(f"never true: {expression}")

    def draw(self, path: Path) -> None:
        """Write the whole page to a PNG, including the part below the window."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def browser(chromium: str, profile: Path) -> Iterator[Browser]:
    """A browser with one tab. `profile`: an empty directory for the browser's own files."""
    (its_reading, writing), (reading, its_writing) = os.pipe(), os.pipe()
    command = [
        sys.executable, "-c", _AS_3_AND_4, str(its_reading), str(its_writing), chromium,
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--hide-scrollbars", f"--user-data-dir={profile}", "--remote-debugging-pipe",
    ]  # fmt: skip
    # Chromium's own log is about the machine, not about the page.
    with subprocess.Popen(
        command, pass_fds=(its_reading, its_writing), stderr=subprocess.DEVNULL
    ) as process:
        os.close(its_reading)
        os.close(its_writing)
        try:
            tab = Browser(reading, writing)
            tab.attach()
            yield tab
        finally:
            os.close(writing)
            os.close(reading)
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
