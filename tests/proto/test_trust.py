"""Whom a process relies on, by the owners and modes of the places."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from prefixd.proto.trust import why_no_place, why_no_secret, why_no_server, why_no_source
from tests.support.users import STRANGER, VICTIM, needs_root

SERVICE = 424_244


@pytest.fixture
def world() -> Iterator[Path]:
    """A directory of root in /run, below which tests give places to users."""
    with TemporaryDirectory(dir="/run") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def place(parent: Path, name: str, owner: int, mode: int = 0o755) -> Path:
    directory = parent / name
    directory.mkdir()
    os.chown(directory, owner, owner)
    directory.chmod(mode)
    return directory


def test_oneself_and_root_are_relied_on_everywhere(tmp_path: Path) -> None:
    assert why_no_server(tmp_path / "s", os.geteuid()) == ""
    assert why_no_server(tmp_path / "s", 0) == ""
    assert why_no_server(Path("/nowhere/s"), 0, VICTIM) == ""


@needs_root
def test_another_user_is_relied_on_where_root_gave_it_the_place(world: Path) -> None:
    for number, (owner, mode) in enumerate([(SERVICE, 0o750), (0, 0o770), (VICTIM, 0o755)]):
        own = place(world, str(number), owner, mode)
        assert why_no_server(own / "s", SERVICE, VICTIM) == ""
        assert why_no_place(own, VICTIM) == ""


@needs_root
def test_a_stranger_is_not_relied_on_where_it_could_make_its_place_itself(world: Path) -> None:
    sticky = place(world, "tmp", 0, 0o1777)
    own = place(sticky, "prefixd-424243", STRANGER)
    assert "every user can write to" in why_no_server(own / "s", STRANGER, VICTIM)
    assert f"belongs to the user {STRANGER}" in why_no_place(own, VICTIM)
    # As an emptyDir of a pod.
    assert "every user can write to" in why_no_server(
        place(world, "emptydir", 0, 0o777) / "s", STRANGER, VICTIM
    )


@needs_root
def test_who_names_the_place_of_another_user_relies_on_that_user_alone(world: Path) -> None:
    """For an address that was given, not for a default one: su keeps $XDG_RUNTIME_DIR."""
    runtime = place(world, "runtime", SERVICE, 0o700)
    own = place(runtime, "prefixd", SERVICE)
    assert why_no_server(own / "s", SERVICE, VICTIM) == ""
    assert f"of the user {SERVICE}" in why_no_server(own / "s", STRANGER, VICTIM)
    assert f"belongs to the user {SERVICE}" in why_no_place(own, VICTIM)


@needs_root
def test_a_link_that_a_stranger_could_make_leads_nowhere(world: Path) -> None:
    sticky = place(world, "tmp", 0, 0o1777)
    runtime = place(world, "runtime", STRANGER, 0o755)
    (sticky / "prefixd-424243").symlink_to(runtime)
    assert why_no_server(runtime / "s", STRANGER, VICTIM) == ""
    assert why_no_server(sticky / "prefixd-424243" / "s", STRANGER, VICTIM)
    assert why_no_place(sticky / "prefixd-424243", VICTIM)


@needs_root
def test_a_place_of_ones_own_is_for_oneself(world: Path) -> None:
    sticky = place(world, "tmp", 0, 0o1777)
    own = place(sticky, "own", VICTIM, 0o700)
    assert why_no_place(own, VICTIM) == ""
    assert why_no_place(sticky / "missing", VICTIM) == ""
    own.chmod(0o777)
    assert "every user can write to" in why_no_place(own, VICTIM)


def test_links_in_a_circle_are_an_answer(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "too many symbolic links" in why_no_place(tmp_path / "a" / "c")


def status(owner: int, group: int, mode: int) -> os.stat_result:
    return os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, group, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("owner", "group", "mode", "good"),
    [
        (os.geteuid(), 1, 0o600, True),
        (os.geteuid(), 1, 0o400, True),
        (0, 5, 0o440, True),
        (0, 5, 0o640, True),
        (0, 6, 0o440, False),
        (0, 5, 0o460, False),
        (0, 5, 0o444, False),
        (0, 5, 0o604, False),
        (STRANGER, 5, 0o600, False),
    ],
)
def test_a_secret_is_for_its_owner_and_for_the_group_that_root_chose(
    owner: int, group: int, mode: int, good: bool
) -> None:
    assert (why_no_secret(status(owner, group, mode), {5}) == "") is good


def test_what_is_read_back_was_written_by_oneself() -> None:
    assert why_no_source(status(os.geteuid(), 5, 0o644)) == ""
    assert why_no_source(status(0, 5, 0o644)) == ""
    assert why_no_source(status(STRANGER, 5, 0o600)) == f"it belongs to the user {STRANGER}"
    for mode in (0o660, 0o606):
        assert why_no_source(status(0, 5, mode)) == "others than its owner can write to it"
