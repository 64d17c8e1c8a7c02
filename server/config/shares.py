"""What namespaces are sure of in a tier, as it is written: `team-a=4GiB, team-b=512MiB`."""

from __future__ import annotations

from ...proto.limits import MAX_NAMESPACES
from ...proto.namespaces import NAME
from ...proto.units import parse_bytes


def parse_shares(text: str) -> dict[str, int]:
    """The bytes that each namespace is sure of. Raises ValueError."""
    shares: dict[str, int] = {}
    for each in text.split(",") if text.strip() else ():
        name, equals, size = (part.strip() for part in each.partition("="))
        if not equals or not NAME.fullmatch(name):
            raise ValueError(
                f"should be NAMESPACE=SIZE, with commas between; {each.strip()!r} is not"
            )
        share_bytes = parse_bytes(size)
        if not share_bytes:
            raise ValueError(f"{name!r} has a share of nothing; leave it out")
        if name in shares:
            raise ValueError(f"{name!r} has two shares")
        shares[name] = share_bytes
    if len(shares) > MAX_NAMESPACES:
        raise ValueError(f"has {len(shares)} namespaces, at most {MAX_NAMESPACES}")
    return shares
