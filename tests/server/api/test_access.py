"""Tokens and roles: each caller may do what its role allows, and no token is shown or accepted in
part."""

from __future__ import annotations

import hmac
from contextlib import suppress
from pathlib import Path

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import ConfigError, NotAuthenticated, NotPermitted
from prefixd.proto.namespaces import TenantNamespace
from prefixd.server.api import access
from prefixd.server.api.access import ADMIN_ROLES, CACHE_ROLES, Access, Role, Tokens

TOKENS = {role: role.name.lower() * 10 + "!" * 20 for role in Role}


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def lines() -> str:
    return "".join(
        f"{role.name.lower()} its-{role.name} {token}\n" for role, token in TOKENS.items()
    )


def test_every_rpc_has_a_role() -> None:
    assert CACHE_ROLES.keys() == set(pb.DESCRIPTOR.services_by_name["Cache"].methods_by_name)
    assert ADMIN_ROLES.keys() <= set(pb.DESCRIPTOR.services_by_name["Admin"].methods_by_name)


def test_each_may_what_its_role_may(tmp_path: Path) -> None:
    tokens = Tokens.from_file(written(tmp_path / "t", f"# ours\n\n{lines()}"))
    assert len(tokens) == 4
    for role, token in TOKENS.items():
        for needed in Role:
            if role.allows(needed):
                access = tokens.permit(needed, f"Bearer {token}")
                assert (access.token, access.role) == (f"its-{role.name}", role)
                assert access.namespace is None
            else:
                with pytest.raises(NotPermitted, match=f"has the role {role.name.lower()}"):
                    tokens.permit(needed, f"Bearer {token}")
    # What a watcher, a reader, a writer and an operator may not do.
    assert tokens.refusals == 3 + 3 + 2 + 0


def test_a_token_may_be_of_a_namespace(tmp_path: Path) -> None:
    text = f"write one {'x' * 32} team-a\nread two {'y' * 32}\nread three {'z' * 32} b.c\n"
    tokens = Tokens.from_file(written(tmp_path / "t", text))
    found = [tokens.permit(Role.READ, f"Bearer {c * 32}") for c in "xyz"]
    assert [access.namespace for access in found] == [
        TenantNamespace("team-a"),
        None,
        TenantNamespace("b.c"),
    ]
    assert tokens.namespaces == {"team-a", "b.c"}
    path = written(tmp_path / "u", f"read nodes {'x' * 32} *\nadmin two {'y' * 32}\n")
    every = [Tokens.from_file(path).permit(Role.READ, f"Bearer {c * 32}") for c in "xy"]
    assert [(access.every, access.namespace) for access in every] == [(True, None)] * 2
    assert not any(access.every for access in found)


@pytest.mark.parametrize(
    "given",
    ["", "Bearer ", "Bearer x", TOKENS[Role.ADMIN], f"bearer {TOKENS[Role.ADMIN]}",
     f"Bearer {TOKENS[Role.ADMIN]} ", f"Bearer {TOKENS[Role.ADMIN][:-1]}", "Bearer \ud800"],
)  # fmt: skip
def test_what_is_not_a_token_opens_nothing(tmp_path: Path, given: str) -> None:
    tokens = Tokens.from_file(written(tmp_path / "t", lines()))
    with pytest.raises(NotAuthenticated) as refused:
        tokens.permit(Role.READ, given)
    assert not any(token[:8] in str(refused.value) for token in TOKENS.values())


def test_all_are_compared_whichever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each known token is compared, in constant time."""
    tokens = Tokens.from_file(written(tmp_path / "t", lines()))
    compared: list[bytes] = []

    def watched(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return hmac.compare_digest(known, given)

    monkeypatch.setattr(access, "compare_digest", watched)
    for token in TOKENS.values():
        with suppress(NotPermitted):
            tokens.permit(Role.READ, f"Bearer {token}")
    assert len(compared) == len(TOKENS) ** 2


def test_tokens_are_shown_nowhere(tmp_path: Path) -> None:
    tokens = Tokens.from_file(written(tmp_path / "t", lines()))
    everything = f"{tokens!r} {tokens} {vars(tokens)}"
    assert not any(token in everything for token in TOKENS.values())


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (lines(), 0o620, "others than its owner"),
        (lines(), 0o604, "others than its owner"),
        ("", 0o600, "0 tokens"),
        ("read a short", 0o600, "line 1 .*at least 32"),
        (f"{lines()}write b {'y' * 32} z z", 0o600, "line 5"),
        (f"root b {'y' * 32}", 0o600, "line 1"),
        (f"read a {'y' * 32}\nadmin b {'y' * 32}", 0o600, "twice"),
        ("".join(f"read n{n} {n:040}\n" for n in range(1001)), 0o600, "1001 tokens"),
        (f"write b {'y' * 32} no/name", 0o600, "line 1 .*NAMESPACE"),
        (f"write b {'y' * 32} -a", 0o600, "line 1 .*NAMESPACE"),
        (f"admin b {'y' * 32} team-a", 0o600, "line 1 .*operators.*every namespace"),
        (f"watch b {'y' * 32} *", 0o600, "line 1 .*watcher.*every namespace"),
        ("".join(f"read n {n:040} team-{n}\n" for n in range(33)), 0o600, "33 namespaces"),
    ],
)
def test_a_file_that_is_wrong_is_refused_without_its_secrets(
    tmp_path: Path, text: str, mode: int, why: str
) -> None:
    path = written(tmp_path / "t", text, mode)
    with pytest.raises(ConfigError, match=why) as refused:
        Tokens.from_file(path)
    assert "server.tokens" in str(refused.value)
    assert "yyyy" not in str(refused.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Tokens.from_file(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"no file|Is a directory"):
        Tokens.from_file(tmp_path)
    path = tmp_path / "t"
    path.write_bytes(b"\xff\xfe")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="not text"):
        Tokens.from_file(path)


def test_the_file_is_read_again_whole_or_not_at_all(tmp_path: Path) -> None:
    path = written(tmp_path / "t", lines())
    tokens = Tokens.from_file(path)
    path.write_text(f"admin new {'n' * 32}\nnonsense")
    with pytest.raises(ConfigError, match="line 2"):
        tokens.read()
    assert tokens.permit(Role.READ, f"Bearer {TOKENS[Role.READ]}").token == "its-READ"
    path.write_text(f"admin new {'n' * 32}\n")
    before = tokens.permit(Role.READ, f"Bearer {TOKENS[Role.READ]}")
    assert before in tokens.accesses()
    tokens.use(tokens.read())
    assert before not in tokens.accesses(), "it is known that it was taken out"
    assert tokens.permit(Role.ADMIN, f"Bearer {'n' * 32}").token == "new"
    with pytest.raises(NotAuthenticated):
        tokens.permit(Role.READ, f"Bearer {TOKENS[Role.READ]}")


def test_who_watches_does_not_read() -> None:
    """Anybody with a key can read its entry, and a watcher learns all keys."""
    tokens = Tokens([(Access(role.name, role), role.name * 40) for role in Role])
    for role in Role:
        given = f"Bearer {role.name * 40}"
        if role in (Role.WATCH, Role.ADMIN):
            assert tokens.permit(Role.WATCH, given).token == role.name
        else:
            with pytest.raises(NotPermitted, match="this takes watch"):
                tokens.permit(Role.WATCH, given)
    for needed in (Role.READ, Role.WRITE, Role.ADMIN):
        with pytest.raises(NotPermitted, match="has the role watch"):
            tokens.permit(needed, f"Bearer {'WATCH' * 40}")
