"""The tables of commands over traces, also for empty traces."""

from io import StringIO

import pytest
from rich.console import Console, RenderableType

from prefixd.client.ctl.views import lab as lab_views
from prefixd.client.lab.advise import advise
from prefixd.client.lab.analyze import analyze
from prefixd.client.lab.trace import Request


def text_of(view: RenderableType, width: int = 200) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(view)
    assert isinstance(console.file, StringIO)
    return " ".join(console.file.getvalue().split())


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0s"), (0.85, "850ms"), (0.0004, "0s"), (59, "59s"), (3536.999, "58m57s")],
)
def test_seconds(value: float, text: str) -> None:
    assert lab_views.seconds(value) == text


def test_nothing_of_nothing() -> None:
    empty = [Request(0, 0, 0, ())]
    found = analyze(empty)
    assert "requests 1 in 0s" in text_of(lab_views.analysis(found.to_json()))
    needs = advise(empty, bytes_per_token=1).to_json()
    text = text_of(lab_views.advice(needs))
    assert "0 of 0 different blocks" in text
    assert "(+0 tokens)." in text
    assert "The split" not in text


def test_a_written_trace_says_where_it_is_unless_that_is_standard_output() -> None:
    found = analyze([Request(500, 600, 1, (1, 2)), Request(2000, 600, 1, (1, 3))])
    data = {"output": "a.jsonl", **found.to_json()}
    text = text_of(lab_views.written(data))
    assert "written a.jsonl requests 2 in 1.5s" in text
    assert "4, 3 different, 512 tokens each" in text
    assert "25.00 % of the blocks, 42.67 % of the tokens" in text
    assert "written" not in text_of(lab_views.written({**data, "output": "-"}))
    read = lab_views.written({**data, "formats": {"text": 1200, "openai-chat": 3}})
    assert "1,200 of text, 3 of openai-chat" in text_of(read)
