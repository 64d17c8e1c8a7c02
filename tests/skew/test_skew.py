"""The harness itself, with this release on both sides. `make skew PREVIOUS=...` has two."""

from __future__ import annotations

import sys

import pytest

from tests.support.warm import WARM

from . import run as subject
from .run import Release, Report, try_clients, try_files, try_keys

#: Runs the program that follows, in a process that has the imports already.
RUN = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
FORKED = (*WARM[1:], "-c", RUN)
ONE, OTHER = (Release(name, sys.executable, FORKED) for name in ("one", "other"))


#: What moves bytes on a route: nothing is called where they are read in place.
CALLED = {"local": set(), "data": {"Read", "Fetch"}, "grpc": {"Read"}}


@pytest.mark.parametrize("route", subject.ROUTES)
def test_a_release_understands_itself(route: str) -> None:
    report = Report()
    try_clients(report, daemons=ONE, clients=OTHER, routes=(route,), tiers=("disk",))
    assert not report.broken, report.lines
    assert [line["found"] for line in report.lines] == [subject.COUNT] * 2
    for line in report.lines:
        assert {name for name, times in line["rpcs"].items() if times} & {"Read", "Fetch"} == (
            CALLED[route]
        ), "it went the way that it is to try"


def test_a_release_opens_its_own_files() -> None:
    report = Report()
    try_keys(report, ONE, OTHER)
    try_files(report, ONE, OTHER, kept=True)
    assert not report.broken, report.lines
    found = {line["what"]: line["found"] for line in report.lines if "found" in line}
    assert found["other opens what one left (killed): shm"] == subject.COUNT
    assert found["other opens what one left (killed): ram"] == 0


def test_what_is_not_as_promised_is_seen() -> None:
    """A release that finds nothing, and one whose bytes are wrong."""

    class Broken(Release):
        def visit(self, *arguments: object) -> object:
            return super().visit(*arguments) | {"found": 0, "wrong": 1}

    report = Report()
    broken = Broken("broken", sys.executable, FORKED)
    try_clients(report, daemons=ONE, clients=broken, routes=("grpc",), tiers=("ram",))
    assert report.broken == ["one saves, broken restores, daemon of one: grpc, ram"]
