"""Every claim in SECURITY.md has tests, and its table of roles is that of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from prefixd.server.api.access import ADMIN_ROLES, CACHE_ROLES, Role

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "SECURITY.md").read_text()


def section(title: str) -> list[list[str]]:
    """The rows of the table below a heading."""
    text = TEXT.split(f"## {title}")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_every_claim_names_tests_that_exist() -> None:
    claims = section("What is defended")
    assert len(claims) > 15
    bounds = section("What one client can take")
    assert len(bounds) > 20
    for claim, *_, tests in (*claims, *bounds):
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert named, claim
        assert len(named) == len(tests.split(", ")), claim
        for path, name in named:
            tree = ast.parse((ROOT / "tests" / path).read_text())
            found = {getattr(node, "name", "") for node in ast.walk(tree)}
            assert name in found, f"{path} has no {name}"


def test_the_table_of_roles_is_that_of_the_code() -> None:
    rows = {role: rpcs.split(", ") for role, rpcs in section("Roles")}
    assert rows.keys() == {role.name.lower() for role in Role}
    for role in ("read", "write", "watch"):
        assert set(rows[role]) == {
            name
            for name, needed in (CACHE_ROLES | ADMIN_ROLES).items()
            if needed.name.lower() == role
        }
