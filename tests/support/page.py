"""A parser of HTML reports, for tests that check their contents."""

import json
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """Collects all texts and attributes, the elements with a `data-figure`, and the JSON data."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.figures: list[tuple[str, str, dict[str, str | None]]] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
        self.data: Any = None
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "link", "br"):
            self._open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self._open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"

    def handle_data(self, data: str) -> None:
        tag, attributes = self._open[-1] if self._open else ("", {})
        if tag == "script" and attributes.get("type") == "application/json":
            self.data = json.loads(data)
        elif tag not in ("script", "style"):
            self.texts.append(data)
            if figure := attributes.get("data-figure"):
                self.figures.append((figure, data, attributes))
