"""A second metadata server, made of dicts and lists: slow, obvious, and nothing of it is shared
with the first one.

It counts by looking at everything again, each time. What it says has the form of plain tuples;
`machine.plain` brings what `MetaState` says into the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

#: An answer, or the tokens of the saves that it waits for.
Attempt = Callable[[bool], Any]

BEFORE = "readers from before the restart"


@dataclass
class TwinTier:
    budget: int
    limit: int
    cap: int  # entries; 0: as many as fit
    cost: Callable[[int, int], int]  # payload and token id bytes -> bytes of the budget
    slow: bool  # says later whether it could
    in_flight: int  # bytes that may be reserved at once, but for one save alone; 0: all of them


@dataclass(frozen=True)
class TwinLimits:
    sessions: int
    claims: int
    reservations: int
    waiters: int
    lost_after: int


class Twin:
    def __init__(self, tiers: dict[str, TwinTier], limits: TwinLimits) -> None:
        self.tiers = tiers
        self.limits = limits
        self.now = 0
        self.entries: dict[str, dict[str, Any]] = {}
        self.order: dict[str, list[str]] = {tier: [] for tier in tiers}  # next victim first
        self.dirty: list[str] = []
        self.sessions: dict[int, dict[str, Any]] = {}
        self.claims: dict[int, dict[str, Any]] = {}
        self.saves: dict[int, dict[str, Any]] = {}
        self.parked: dict[int, dict[str, Any]] = {}
        self.opened = self.claimed = self.reserved = self.batches = 0
        self.said: list[tuple[Any, ...]] = []
        self.woken: list[int] = []

    def happens(self, now: int, what: Callable[[], None]) -> list[tuple[Any, ...]]:
        """Let something happen, then answer whoever it woke; returns everything that was said."""
        self.now, self.said, self.woken = now, [], []
        what()
        for request in self.woken:
            parked = self.parked.pop(request, None)
            if parked is not None:
                self.ask(request, parked["until"], parked["session"], parked["attempt"])
        return self.said

    def say(self, *fact: Any) -> None:
        self.said.append(fact)

    # ---- questions

    def ask(self, request: int, until: int, session: int | None, attempt: Attempt) -> None:
        patient = self.now < until and len(self.parked) < self.limits.waiters
        answer = attempt(patient)
        if isinstance(answer, set):
            self.parked[request] = {
                "until": until,
                "session": session,
                "attempt": attempt,
                "tokens": answer,
            }
        else:
            self.say("reply", request, answer)

    def open(self, request: int, owner: str) -> None:
        if len(self.sessions) >= self.limits.sessions:
            self.say("reply", request, ("refused", "limit_reached"))
            return
        self.opened += 1
        self.sessions[self.opened] = {"owner": owner, "heard": self.now, "lost": []}
        self.say("reply", request, ("opened", self.opened))

    def saver_of(self, key: str) -> dict[str, Any] | None:
        for save in self.saves.values():
            if save["key"] == key and save["stage"] != "doomed":
                return save
        return None

    def find(self, key: str) -> tuple[Any, ...] | None:
        entry = self.entries.get(key)
        if entry is not None:
            return ("entry", key, entry["tier"], entry["payload"], entry["tokens"], entry["crc"])
        save = self.saver_of(key)
        if save is None:
            return None
        session = self.sessions.get(save["session"])
        owner = session["owner"] if session else "a session that ended"
        return ("in flight", owner, self.now - save["since"])

    def in_flight(self, keys: Iterable[str]) -> set[int]:
        savers = [self.saver_of(key) for key in keys if key not in self.entries]
        return {save["token"] for save in savers if save is not None}

    def lookup(self, keys: list[str], stop: bool, patient: bool) -> Any:
        seen = []
        for key in keys:
            seen.append(key)
            if stop and key not in self.entries:
                break
        pending = self.in_flight(seen)
        if pending and patient:
            return pending
        return ("lookup", [self.find(key) for key in seen])

    def claim(self, session: int, keys: list[str], mode: str, lease: int, patient: bool) -> Any:
        if session not in self.sessions:
            return ("refused", "unknown_session")
        if self.claims_of(session) >= self.limits.claims:
            return ("refused", "limit_reached")
        seen = []
        for key in keys:
            seen.append(key)
            present = key in self.entries
            if (mode == "first" and present) or (mode == "run" and not present):
                break
        pending = self.in_flight(seen)
        if pending and patient:
            return pending
        found = [self.find(key) for key in seen]
        mine = [key for key in seen if key in self.entries]
        if not mine:
            return ("claim", 0, lease, found, [False] * len(seen))
        self.claimed += 1
        for key in reversed(mine):
            self.use(key)
        self.hold(session, mine, lease)
        return ("claim", self.claimed, lease, found, [key in mine for key in seen])

    def hold(self, session: int, keys: list[str], lease: int) -> None:
        for key in keys:
            entry = self.entries[key]
            if not entry["pins"]:
                self.order[entry["tier"]].remove(key)
                self.mark(key, True)
            entry["pins"] += 1
        self.claims[self.claimed] = {
            "session": session,
            "keys": keys,
            "taken": self.now,
            "lease": lease,
        }

    def mark(self, key: str, claimed: bool) -> None:
        if self.entries[key]["tier"] == "shm":
            self.say("mark", key, claimed)

    def claims_of(self, session: int) -> int:
        return sum(1 for claim in self.claims.values() if claim["session"] == session)

    def release(self, request: int, session: int, claims: list[int]) -> None:
        if session not in self.sessions:
            self.say("reply", request, ("refused", "unknown_session"))
            return
        results = []
        for number in claims:
            claim = self.claims.get(number)
            if claim is not None and claim["session"] == session:
                self.give_back(number)
                results.append("released")
            elif number in self.sessions[session]["lost"]:
                results.append("lost")
            elif claim is None and 1 <= number <= self.claimed:
                results.append("already")
            else:
                results.append("unknown")
        self.say("reply", request, ("release", results))

    def give_back(self, number: int) -> None:
        for key in reversed(self.claims.pop(number)["keys"]):
            entry = self.entries[key]
            entry["pins"] -= 1
            if not entry["pins"]:
                self.order[entry["tier"]].append(key)
                self.note_use(key)
                self.mark(key, False)

    def lose_claim(self, number: int) -> None:
        session = self.claims[number]["session"]
        self.give_back(number)
        lost = self.sessions[session]["lost"]
        lost.append(number)
        del lost[: -self.limits.claims]
        self.say("claim lost", session, number)

    # ---- use

    def note_use(self, key: str) -> None:
        if self.entries[key]["tier"] == "ram":
            return  # nobody comes back to it
        if key in self.dirty:
            self.dirty.remove(key)
        self.dirty.append(key)

    def refresh(self, key: str) -> None:
        order = self.order[self.entries[key]["tier"]]
        if key in order:
            order.remove(key)
            order.append(key)
        self.note_use(key)

    def use(self, key: str) -> None:
        self.entries[key]["hits"] += 1
        self.refresh(key)

    def touch(self, keys: list[str]) -> None:
        for key in keys:
            if key in self.entries:
                self.use(key)

    def suspect(self, keys: list[str]) -> None:
        for key in keys:
            if key in self.entries:
                self.say("verify", key)

    # ---- room

    def used(self, tier: str) -> tuple[int, int]:
        """Bytes and entries, published and reserved."""
        mine = [e["cost"] for e in self.entries.values() if e["tier"] == tier]
        mine += [s["cost"] for s in self.saves.values() if s["tier"] == tier]
        return sum(mine), len(mine)

    def unpinned(self, tier: str) -> tuple[int, int]:
        costs = [self.entries[key]["cost"] for key in self.order[tier]]
        return sum(costs), len(costs)

    def leave(self, key: str) -> None:
        entry = self.entries.pop(key)
        self.order[entry["tier"]].remove(key)
        if key in self.dirty:
            self.dirty.remove(key)
        self.say("delete", key)
        self.say("erase", entry["tier"], key)

    def make_room(self, tier: str, cost: int) -> str | None:
        rules = self.tiers[tier]
        if cost > rules.budget:
            return "too large"
        used, entries = self.used(tier)
        free, gone = self.unpinned(tier)
        reserved = [save["cost"] for save in self.saves.values() if save["tier"] == tier]
        if rules.in_flight and reserved and sum(reserved) + cost > rules.in_flight:
            return "no room"
        if used - free + cost > rules.limit or (rules.cap and entries - gone + 1 > rules.cap):
            return "no room"
        while used + cost > rules.limit or (rules.cap and entries + 1 > rules.cap):
            self.leave(self.order[tier][0])
            used, entries = self.used(tier)
        return None

    def evict(self, request: int, tiers: list[str], free: int) -> None:
        if any(tier not in self.tiers for tier in tiers):
            self.say("reply", request, ("refused", "unknown_tier"))
            return
        results = []
        for tier in tiers or list(self.tiers):
            victims = freed = 0
            while freed < free and self.order[tier]:
                freed += self.entries[self.order[tier][0]]["cost"]
                victims += 1
                self.leave(self.order[tier][0])
            results.append((tier, victims, freed))
        self.say("reply", request, ("evict", results))

    def damage(self, key: str) -> None:
        for number in [n for n, claim in self.claims.items() if key in claim["keys"]]:
            self.lose_claim(number)
        self.leave(key)

    # ---- saves

    def reserve(
        self,
        session: int,
        tier: str,
        items: list[tuple[str, int, int]],
        ancestors: list[str],
        begin: bool,
        ttl: int,
        patient: bool,
    ) -> Any:
        if session not in self.sessions:
            return ("refused", "unknown_session")
        if tier not in self.tiers:
            return ("refused", "unknown_tier")
        mine = sum(1 for save in self.saves.values() if save["session"] == session)
        if mine + len(items) > self.limits.reservations:
            return ("refused", "limit_reached")
        pending = self.in_flight(key for key, _, _ in items)
        if pending and patient:
            return pending
        keys = [key for key, _, _ in items]
        chain = ancestors + keys
        for key in reversed(chain):
            if key in self.entries:
                self.use(key) if key in keys else self.refresh(key)
        self.batches += 1
        results = [
            self.reserve_one(session, tier, item, chain, "writing" if begin else "reserved", ttl)
            for item in items
        ]
        return ("reserve", ttl, results)

    def reserve_one(
        self,
        session: int,
        tier: str,
        item: tuple[str, int, int],
        chain: list[str],
        stage: str,
        ttl: int,
    ) -> Any:
        key, payload, token_ids = item
        if key in self.entries:
            return "present"
        if self.saver_of(key):
            return self.find(key)
        cost = self.tiers[tier].cost(payload, token_ids)
        refusal = self.make_room(tier, cost)
        if refusal:
            return refusal
        self.reserved += 1
        self.saves[self.reserved] = {
            "token": self.reserved,
            "key": key,
            "session": session,
            "tier": tier,
            "cost": cost,
            "payload": payload,
            "tokens": payload * 2,
            "stage": stage,
            "since": self.now,
            "expires": self.now + ttl,
            "batch": self.batches,
            "chain": chain,
        }
        return self.order_of(self.saves[self.reserved])

    def order_of(self, save: dict[str, Any]) -> tuple[Any, ...]:
        return ("order", save["token"], save["key"], save["tier"], save["payload"], save["tokens"])

    def begin(self, request: int, session: int, token: int) -> None:
        save = self.saves.get(token)
        if session not in self.sessions:
            answer: Any = ("refused", "unknown_session")
        elif save is None or save["session"] != session or save["stage"] != "reserved":
            answer = ("refused", "unknown_reservation")
        else:
            save["stage"] = "writing"
            answer = self.order_of(save)
        self.say("reply", request, answer)

    def seal(self, writes: list[tuple[int, int, int]]) -> None:
        commits: dict[str, list[int]] = {}
        for token, crc, meant in writes:
            save = self.saves[token]
            if save["stage"] == "doomed":
                self.end(token, "lost")
            elif crc != meant:
                self.end(token, "crc mismatch")
            else:
                save["crc"] = crc
                save["stage"] = "committing"
                if self.tiers[save["tier"]].slow:
                    commits.setdefault(save["tier"], []).append(token)
                else:
                    self.publish(token)
        for tier, tokens in commits.items():
            self.say("commit", tier, tokens)

    def publish(self, token: int) -> None:
        save = self.saves[token]
        self.entries[save["key"]] = {
            "tier": save["tier"],
            "cost": save["cost"],
            "payload": save["payload"],
            "tokens": save["tokens"],
            "crc": save["crc"],
            "pins": 0,
            "hits": 0,
        }
        self.order[save["tier"]].append(save["key"])
        self.say("put", save["key"])
        self.end(token, "saved")

    def end(self, token: int, outcome: str) -> None:
        save = self.saves.pop(token)
        self.say("ended", token, outcome)
        self.wake(token)
        if all(other["batch"] != save["batch"] for other in self.saves.values()):
            for key in reversed(save["chain"]):
                if key in self.entries:
                    self.refresh(key)

    def wake(self, token: int) -> None:
        self.woken += sorted(r for r, parked in self.parked.items() if token in parked["tokens"])

    def lose(self, token: int, tell: bool) -> bool:
        save = self.saves[token]
        if save["stage"] in ("committing", "doomed"):
            return False
        if tell:
            self.say("reservation lost", save["session"], token, save["key"])
        if save["stage"] == "reserved":
            self.end(token, "lost")
        else:
            save["stage"] = "doomed"
            self.say("stop", token)
            self.wake(token)
        return True

    def cancel(self, request: int, session: int, tokens: list[int]) -> None:
        if session not in self.sessions:
            self.say("reply", request, ("refused", "unknown_session"))
            return
        results = []
        for token in tokens:
            mine = token in self.saves and self.saves[token]["session"] == session
            results.append(mine and self.lose(token, tell=False))
        self.say("reply", request, ("cancel", results))

    # ---- ends and time

    def lose_session(self, session: int) -> None:
        if session not in self.sessions:
            return
        for request in [r for r, p in self.parked.items() if p["session"] == session]:
            del self.parked[request]
            self.say("reply", request, ("refused", "unknown_session"))
        for token in sorted(t for t, s in self.saves.items() if s["session"] == session):
            self.lose(token, tell=False)
        for number in sorted(n for n, c in self.claims.items() if c["session"] == session):
            self.give_back(number)
        del self.sessions[session]

    def due(self) -> list[tuple[int, int, int]]:
        """Every deadline: when, what kind (in this order at one moment), whose."""
        after = self.limits.lost_after
        due = [(s["heard"] + after, 0, n) for n, s in self.sessions.items()]
        for number, claim in self.claims.items():
            renewed = max(claim["taken"], self.sessions[claim["session"]]["heard"])
            due.append((renewed + claim["lease"], 1, number))
        for token, save in self.saves.items():
            if save["stage"] in ("reserved", "writing"):
                due.append((save["expires"], 2, token))
        due += [(parked["until"], 3, request) for request, parked in self.parked.items()]
        return sorted(due)

    def tick(self, flush: bool) -> None:
        while (due := self.due()) and due[0][0] <= self.now:
            _, kind, number = due[0]
            if kind == 0:
                self.lose_session(number)
            elif kind == 1:
                self.lose_claim(number)
            elif kind == 2:
                self.lose(number, tell=True)
            else:
                parked = self.parked.pop(number)
                self.ask(number, parked["until"], parked["session"], parked["attempt"])
        if flush:
            for tier in self.tiers:
                keys = [key for key in self.dirty if self.entries[key]["tier"] == tier]
                if keys:
                    uses = [(key, self.entries[key]["hits"]) for key in keys]
                    self.say("usage", tier, uses)
            self.dirty = []

    # ---- starts

    def recover(self, tier: str, found: list[dict[str, Any]]) -> None:
        """`found`: key, payload, token_ids, tokens, crc, used, hits; any order."""
        rules = self.tiers[tier]
        kept: list[str] = []
        for one in sorted(found, key=lambda one: one["used"], reverse=True):
            cost = rules.cost(one["payload"], one["token_ids"])
            used, entries = self.used(tier)
            room = used + cost <= rules.limit and (not rules.cap or entries < rules.cap)
            if one["key"] in self.entries or not room:
                self.say("erase", tier, one["key"])
                if one["key"] not in self.entries:
                    self.say("delete", one["key"])
                continue
            self.entries[one["key"]] = {
                "tier": tier,
                "cost": cost,
                "payload": one["payload"],
                "tokens": one["tokens"],
                "crc": one["crc"],
                "pins": 0,
                "hits": one["hits"],
            }
            kept.append(one["key"])
            self.say("put", one["key"])
        self.order[tier] = kept[::-1]

    def inherit(self, keys: list[str], until: int) -> None:
        """Readers of an earlier start that may still be there."""
        if keys:
            self.opened += 1
            heard = until - self.limits.lost_after
            self.sessions[self.opened] = {"owner": BEFORE, "heard": heard, "lost": []}
            self.claimed += 1
            self.hold(self.opened, keys, until - self.now)
