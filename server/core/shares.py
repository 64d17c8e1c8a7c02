"""Fair shares of everything that clients can use up: sessions, calls, connections, memory. Pure.

One rule for all of it: **a tenant never holds more than it leaves free, and a session never holds
more than it leaves free of what its tenant may have.** An eighth is for clients on this host alone.

So one tenant has at most half, two have a third each, and however many there are, the next one
finds room, without anybody having been configured. What is taken stays with its holder until it
gives it back.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ...proto.errors import LimitReached

#: The tenant of all clients that reach the daemon through its Unix sockets.
HOST: Final = ""
#: This part (1/n) is for clients on the daemon's host.
_HOST_PART: Final = 8


class Holder(NamedTuple):
    """Who holds something. A tenant is a namespace, a token without one, or, where there are no
    tokens, the address of a client's host."""

    tenant: str = HOST
    #: 0: of no session, or not of one yet.
    session: int = 0


class Shares:
    """`total` places, or bytes, and who holds how many of them."""

    def __init__(self, what: str, total: int) -> None:
        """`what`: names them in messages, in the plural, with the option that says how many."""
        self.what: Final = what
        #: May be changed: what is held beyond it stays until it is given back.
        self.total = total
        self.used = 0
        #: How often something was refused.
        self.refusals = 0
        #: Held by all tenants but `HOST`.
        self._remote = 0
        self._tenants: dict[str, int] = {}
        self._sessions: dict[Holder, int] = {}

    def held_by(self, holder: Holder) -> int:
        """What a session holds now, or a tenant, if there is no session."""
        if holder.session:
            return self._sessions.get(holder, 0)
        return self._tenants.get(holder.tenant, 0)

    def left_for(self, tenant: str) -> int:
        """What is free, and not kept for others."""
        left = self.total - self.used
        if tenant == HOST:
            return left
        return min(left, self.total - self.total // _HOST_PART - self._remote)

    def has_room(self, amount: int) -> bool:
        """Whether that much is free, whoever asks. What is larger than all of it fits when nothing
        is taken."""
        return not self.used or self.used + amount <= self.total

    def may_take(self, holder: Holder, amount: int = 1) -> bool:
        """Whether the rule lets this holder take so much more. A tenant that holds nothing may
        take what there is, and so may a session as far as its tenant may."""
        if not self.used:
            return self.total > 0
        left = self.left_for(holder.tenant)
        if amount > left:
            return False
        its = 0 if holder.tenant == HOST else self._tenants.get(holder.tenant, 0)
        return leaves_enough(its, amount, left - amount) and self._session_may(
            holder, amount, amount
        )

    def may_keep(self, holder: Holder, amount: int) -> bool:
        """Whether what a tenant took may become that of one of its sessions."""
        return self._session_may(holder, amount, 0)

    def _session_may(self, holder: Holder, amount: int, new: int) -> bool:
        its = self._sessions.get(holder, 0)
        if not its or not holder.session:
            return True
        left = self.left_for(holder.tenant) - new
        if holder.tenant != HOST:
            # What the tenant may still take, until it holds as much as it leaves free.
            left = (left - self._tenants.get(holder.tenant, 0) - new) // 2
        return its + amount <= left

    def take(self, holder: Holder, amount: int = 1) -> None:
        """Raises LimitReached."""
        if not self.may_take(holder, amount):
            self.refusals += 1
            raise LimitReached(self.why(holder))
        self.add(holder, amount)

    def why(self, holder: Holder) -> str:
        """What a holder is told that may take no more."""
        if self.left_for(holder.tenant) <= 0:
            return f"all of the {self.total} {self.what} are taken"
        its_own = self.held_by(holder) or self.held_by(Holder(holder.tenant))
        return (
            f"{its_own} of the {self.total} {self.what} are yours, and you may not hold more than "
            "you leave free to others"
        )

    def add(self, holder: Holder, amount: int = 1) -> None:
        """Count what this holder has taken, whatever the rule says. A negative amount is given
        back."""
        self.used += amount
        if holder.tenant != HOST:
            self._remote += amount
        _add(self._tenants, holder.tenant, amount)
        if holder.session:
            _add(self._sessions, holder, amount)

    def give(self, holder: Holder, amount: int = 1) -> None:
        """Give back what `take` took."""
        self.add(holder, -amount)


def leaves_enough(its: int, more: int, left: int) -> bool:
    """Whether one who holds `its`, and takes `more`, holds no more than is `left` then."""
    return not its or its + more <= left


def may_hold(its: int, more: int, new: int, used: int, total: int) -> bool:
    """The rule for what several may hold at once, as entries are pinned by all who read them.
    `its`: what a tenant holds of the `used` part of `total`. It is to hold `more`, of which nobody
    holds the `new` part yet."""
    left = total - total // _HOST_PART - used - new
    return left >= 0 and leaves_enough(its, more, left)


def _add(counts: dict, key: object, amount: int) -> None:  # type: ignore[type-arg]  # of both kinds
    """Keeps no count of 0."""
    now = counts.get(key, 0) + amount
    if now:
        counts[key] = now
    else:
        counts.pop(key, None)  # there is none, if nothing was taken of nothing
