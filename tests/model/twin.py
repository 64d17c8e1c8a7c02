"""A twin of `MetaState`, made of dicts and lists: slow, obvious, and without shared code.

It counts by visiting everything each time. Its output is plain tuples. `witness.plain` converts the
effects of `MetaState` to the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tests.model.twin_shares import TwinShares, TwinTier

#: Computes a reply, or ("wait", mode, tokens by the positions of keys) if it has to wait for saves.
Attempt = Callable[[bool], Any]


@dataclass(frozen=True)
class TwinLimits:
    sessions: int
    claims: int
    reservations: int
    waiters: int
    lost_after: int
    waited: int  # most saves that all requests wait for, counted per request; below: of one session
    waited_of_one: int
    unwritten: int  # lifetime of a reservation without written bytes


class Twin(TwinShares):
    def __init__(
        self, tiers: dict[str, TwinTier], limits: TwinLimits, parts: dict[str, str] | None = None
    ) -> None:
        self.tiers = tiers
        self.parts = parts or {}  # the namespaces of keys
        self.limits = limits
        self.now = 0
        self.credit = 0
        self.entries: dict[str, dict[str, Any]] = {}
        self.condemned: list[dict[str, Any]] = []  # dropped while claimed
        self.closed: dict[str, str] = {}  # the states of tiers that do not serve
        #: Of keys that left while a tier did not serve, the newest generation.
        self.superseded: dict[str, int] = {}
        self.order: dict[str, list[str]] = {tier: [] for tier in tiers}  # the next victim first
        self.dirty: list[str] = []
        self.sessions: dict[int, dict[str, Any]] = {}
        self.claims: dict[int, dict[str, Any]] = {}
        self.saves: dict[int, dict[str, Any]] = {}
        self.parked: dict[int, dict[str, Any]] = {}
        self.opened = self.claimed = self.reserved = self.batches = 0
        self.output: list[tuple[Any, ...]] = []
        self.deadlines: dict[int, int] = {}  # of requests that wait or have waited
        self.ended: list[tuple[int, bool]] = []  # saves that ended, and whether they were published

    def happens(self, now: int, event: Callable[[], None]) -> list[tuple[Any, ...]]:
        """Apply an event, then answer the requests that waited for it. Returns all output."""
        self.now, self.output = now, []
        event()
        self.answer_waiters()
        return self.output

    @property
    def served(self) -> int:
        return self.now - self.credit

    def answer_waiters(self) -> None:
        """Answer the requests that wait for ended saves, in the order in which they began."""
        while self.ended:
            token, saved = self.ended.pop(0)
            for request in [r for r, p in self.parked.items() if token in p["tokens"].values()]:
                parked = self.parked.get(request)
                if parked is None:
                    continue
                places = {at: t for at, t in parked["tokens"].items() if t != token}
                if (parked["mode"], saved) in (("run", False), ("first", True)):
                    (place,) = (at for at, t in parked["tokens"].items() if t == token)
                    places = {at: t for at, t in places.items() if at < place}
                parked["tokens"] = places
                if not places:
                    del self.parked[request]
                    self.ask(request, parked["until"], parked["session"], parked["attempt"])

    def emit(self, *fact: Any) -> None:
        self.output.append(fact)

    # ---- requests

    def ask(self, request: int, until: int, session: int | None, attempt: Attempt) -> None:
        if session in self.sessions:
            one = self.sessions[session]
            one["alive"] = max(one["alive"], self.served)
        answer = attempt(self.now < until)
        if not isinstance(answer, tuple) or answer[0] != "wait":
            self.emit("reply", request, answer)
            return
        _, mode, tokens = answer
        others = [p["size"] for p in self.parked.values()]
        own = [p["size"] for p in self.parked.values() if p["session"] == session]
        if (
            len(self.parked) >= self.limits.waiters
            or sum(others) + len(tokens) > self.limits.waited
            or sum(own) + len(tokens) > self.limits.waited_of_one
        ):
            self.emit("reply", request, attempt(False))
            return
        self.parked[request] = {
            "until": until,
            # The first deadline stays, even if the request waits for further saves.
            "deadline": self.deadlines.setdefault(request, until - self.credit),
            "session": session,
            "attempt": attempt,
            "mode": mode,
            "tokens": tokens,
            "size": len(tokens),
        }

    def open(self, request: int, owner: str) -> None:
        if len(self.sessions) >= self.limits.sessions:
            self.emit("reply", request, ("refused", "limit_reached"))
            return
        self.opened += 1
        new = {"owner": owner, "heard": self.served, "alive": self.served, "lost": []}
        self.sessions[self.opened] = new
        self.emit("reply", request, ("opened", self.opened))

    def saver_of(self, key: str) -> dict[str, Any] | None:
        for save in self.saves.values():
            if save["key"] == key and save["stage"] != "doomed":
                return save
        return None

    def readable(self, key: str) -> bool:
        return key in self.entries and self.closed.get(self.entries[key]["tier"]) != "hung"

    def look(self, key: str) -> tuple[Any, ...] | None:
        return None if key in self.entries and not self.readable(key) else self.find(key)

    def find(self, key: str) -> tuple[Any, ...] | None:
        entry = self.entries.get(key)
        if entry is not None:
            return ("entry", key, entry["tier"], entry["payload"], entry["tokens"], entry["crc"])
        save = self.saver_of(key)
        if save is None:
            return None
        session = self.sessions.get(save["session"])
        owner = session["owner"] if session else "a session that ended"
        return ("in flight", owner, self.served - save["since"])

    def waits_for(self, keys: Iterable[str], mode: str) -> Any:
        """The saves that a request for these keys waits for. None: it need not wait."""
        tokens = {}
        for place, key in enumerate(keys):
            save = self.saver_of(key)
            if save is not None and key not in self.entries:
                tokens[place] = save["token"]
            elif (mode == "run" and key not in self.entries) or (
                mode == "first" and key in self.entries
            ):
                break
        return ("wait", mode, tokens) if tokens else None

    def lookup(self, keys: list[str], stop: bool, patient: bool) -> Any:
        waits = self.waits_for(keys, "run" if stop else "all")
        if waits and patient:
            return waits
        seen = []
        for key in keys:
            seen.append(key)
            if stop and not self.readable(key):
                break
        return ("lookup", [self.look(key) for key in seen])

    def claim(self, session: int, keys: list[str], mode: str, lease: int, patient: bool) -> Any:
        if session not in self.sessions:
            return ("refused", "unknown_session")
        if self.claims_of(session) >= self.limits.claims:
            return ("refused", "limit_reached")
        waits = self.waits_for(keys, mode)
        if waits and patient:
            return waits
        seen = []
        for key in keys:
            seen.append(key)
            present = self.readable(key)
            if (mode == "first" and present) or (mode == "run" and not present):
                break
        found = [self.look(key) for key in seen]
        mine = [key for key in seen if self.readable(key)]
        if not mine:
            return ("claim", 0, lease, found, [False] * len(seen))
        new = [self.entries[key] for key in mine if not self.entries[key]["pins"]]
        if not all(self.may_fix(tier, new) for tier in self.tiers):
            return ("refused", "limit_reached")
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
            entry["pins"] += 1
        self.claims[self.claimed] = {
            "session": session,
            "entries": [self.entries[key] for key in keys],
            "taken": self.served,
            "lease": lease,
        }

    def claims_of(self, session: int) -> int:
        return sum(1 for claim in self.claims.values() if claim["session"] == session)

    def release(self, request: int, session: int, claims: list[int]) -> None:
        if session not in self.sessions:
            self.emit("reply", request, ("refused", "unknown_session"))
            return
        results = []
        for number in claims:
            claim = self.claims.get(number)
            if claim is not None and claim["session"] == session:
                whole = not any(one is two for one in self.condemned for two in claim["entries"])
                self.give_back(number)
                results.append("released" if whole else "lost")
                if not whole:
                    self.remember_loss(session, number)
            elif number in self.sessions[session]["lost"]:
                results.append("lost")
            elif claim is None and 1 <= number <= self.claimed:
                results.append("already")
            else:
                results.append("unknown")
        self.emit("reply", request, ("release", results))

    def give_back(self, number: int) -> None:
        for entry in reversed(self.claims.pop(number)["entries"]):
            entry["pins"] -= 1
            if entry["pins"]:
                continue
            if any(entry is one for one in self.condemned):
                self.condemned = [one for one in self.condemned if one is not entry]
            else:
                self.order[entry["tier"]].append(entry["key"])
                self.note_use(entry["key"])

    def lose_claim(self, number: int) -> None:
        session = self.claims[number]["session"]
        self.give_back(number)
        self.remember_loss(session, number)
        self.emit("claim lost", session, number)

    def remember_loss(self, session: int, number: int) -> None:
        lost = self.sessions[session]["lost"]
        lost.append(number)
        del lost[: -self.limits.claims]

    # ---- use

    def note_use(self, key: str) -> None:
        if self.entries[key]["tier"] == "ram":
            return  # uses in RAM are not recorded
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
                self.emit("verify", key)

    # ---- room

    def leave(self, key: str) -> None:
        entry = self.entries.pop(key)
        if self.closed:
            self.superseded[key] = max(entry["generation"], self.superseded.get(key, 0))
        if entry["pins"]:
            self.condemned.append(entry)
        else:
            self.order[entry["tier"]].remove(key)
        if key in self.dirty:
            self.dirty.remove(key)
        self.emit("delete", key)
        self.emit("erase", entry["tier"], key)

    def make_room(self, tier: str, key: str, cost: int) -> Any:
        rules = self.tiers[tier]
        if cost > rules.budget:
            return "too large"
        mine = rules.shares.get(self.part(tier, key), 0)
        if rules.shares and cost > rules.budget - sum(rules.shares.values()) + mine:
            return ("over share", tier, True)
        if tier in self.closed:
            return ("closed", tier, self.closed[tier])
        used, entries = self.used(tier)
        free, gone = self.unpinned(tier)
        reserved = [save["cost"] for save in self.saves.values() if save["tier"] == tier]
        if rules.in_flight and reserved and sum(reserved) + cost > rules.in_flight:
            return "no room"
        if not self.may_fix(tier, [{"tier": tier, "key": key, "cost": cost}]):
            return ("over share", tier, False)
        if used - free + cost > rules.limit or (rules.cap and entries - gone + 1 > rules.cap):
            return "no room"
        while used + cost > rules.limit or (rules.cap and entries + 1 > rules.cap):
            victim = self.next_out(tier, key, cost)
            assert victim is not None
            self.leave(victim)
            used, entries = self.used(tier)
        return None

    def evict(self, request: int, tier: str, free: int, most: int) -> None:
        if tier not in self.tiers:
            self.emit("reply", request, ("refused", "unknown_tier"))
            return
        victims = freed = 0
        while freed < free and victims < most and self.order[tier]:
            victim = self.next_out(tier, below=True)
            assert victim is not None
            freed += self.entries[victim]["cost"]
            victims += 1
            self.leave(victim)
        more = freed >= free or victims == most
        self.emit("reply", request, ("evict", victims, freed, more))

    def damage(self, key: str) -> None:
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
        keys = [key for key, _, _ in items]
        waits = self.waits_for(keys, "all")
        if waits and patient:
            return waits
        chain = ancestors + keys
        for key in reversed(chain):
            if key in self.entries:
                self.use(key) if key in keys else self.refresh(key)
        self.batches += 1
        results = [
            self.reserve_one(session, tier, item, chain, "writing" if begin else "reserved", ttl)
            for item in items
        ]
        return ("reserve", ttl if begin else min(ttl, self.limits.unwritten), results)

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
        refusal = self.make_room(tier, key, cost)
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
            "token_ids": token_ids,
            "tokens": payload * 2,
            "stage": stage,
            "since": self.served,
            "ttl": ttl,
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
        elif (
            save is None
            or save["session"] != session
            or save["stage"] != "reserved"
            or save["tier"] in self.closed
        ):
            answer = ("refused", "unknown_reservation")
        else:
            save["stage"] = "writing"
            answer = self.order_of(save)
        self.emit("reply", request, answer)

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
            self.emit("commit", tier, tokens)

    def publish(self, token: int) -> None:
        save = self.saves[token]
        if save["key"] in self.entries:
            self.leave(save["key"])  # found while this save was being committed
        self.entries[save["key"]] = {
            # Later than any that was found.
            "generation": 10**6 + token,
            "token_ids": save["token_ids"],
            "tier": save["tier"],
            "cost": save["cost"],
            "payload": save["payload"],
            "tokens": save["tokens"],
            "crc": save["crc"],
            "key": save["key"],
            "pins": 0,
            "hits": 0,
        }
        self.order[save["tier"]].append(save["key"])
        self.emit("put", save["key"])
        self.end(token, "saved")

    def end(self, token: int, outcome: str) -> None:
        save = self.saves.pop(token)
        self.emit("ended", token, outcome)
        if save["stage"] != "doomed":
            self.ended.append((token, outcome == "saved"))
        if all(other["batch"] != save["batch"] for other in self.saves.values()):
            for key in reversed(save["chain"]):
                if key in self.entries:
                    self.refresh(key)

    def lose(self, token: int, tell: bool) -> bool:
        save = self.saves[token]
        if save["stage"] in ("committing", "doomed"):
            return False
        if tell:
            self.emit("reservation lost", save["session"], token, save["key"])
        if save["stage"] == "reserved":
            self.end(token, "lost")
        else:
            save["stage"] = "doomed"
            self.emit("stop", token)
            self.ended.append((token, False))
        return True

    def cancel(self, request: int, session: int, tokens: list[int]) -> None:
        if session not in self.sessions:
            self.emit("reply", request, ("refused", "unknown_session"))
            return
        results = []
        for token in tokens:
            mine = token in self.saves and self.saves[token]["session"] == session
            results.append(mine and self.lose(token, tell=False))
        self.emit("reply", request, ("cancel", results))

    # ---- session ends and time

    def lose_session(self, session: int) -> None:
        if session not in self.sessions:
            return
        del self.sessions[session]
        for request in [r for r, p in self.parked.items() if p["session"] == session]:
            del self.parked[request]
            self.emit("reply", request, ("refused", "unknown_session"))
        for token in sorted(t for t, s in self.saves.items() if s["session"] == session):
            self.lose(token, tell=False)
        for number in sorted(n for n, c in self.claims.items() if c["session"] == session):
            self.give_back(number)

    def due(self) -> list[tuple[int, int, int]]:
        """Every deadline: time, kind (in this order at equal times), number."""
        after = self.limits.lost_after
        holding = {one["session"] for one in (*self.saves.values(), *self.claims.values())}
        holding |= {parked["session"] for parked in self.parked.values()}
        due = [
            (s["alive"] + (after if n in holding else 5 * after), 0, n)
            for n, s in self.sessions.items()
        ]
        for number, claim in self.claims.items():
            renewed = max(claim["taken"], self.sessions[claim["session"]]["heard"])
            due.append((renewed + claim["lease"], 1, number))
        for token, save in self.saves.items():
            if save["stage"] == "writing":
                due.append((save["since"] + save["ttl"], 2, token))
            elif save["stage"] == "reserved":
                stands = min(save["ttl"], self.limits.unwritten)
                due.append((save["since"] + stands, 2, token))
        due += [(parked["deadline"], 3, request) for request, parked in self.parked.items()]
        return sorted(due)

    def tick(self, flush: bool, late: int = 0) -> None:
        self.credit += late
        while (due := self.due()) and due[0][0] <= self.served:
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
            self.answer_waiters()
        if flush:
            for tier in self.tiers:
                keys = [key for key in self.dirty if self.entries[key]["tier"] == tier]
                if keys:
                    uses = [(key, self.entries[key]["hits"]) for key in keys]
                    self.emit("usage", tier, uses)
            self.dirty = []

    # ---- recovery

    def outlives(self, tier: str, one: dict[str, Any]) -> bool:
        """A found record replaces an earlier save, and the same content in a less durable tier."""
        there = self.entries.get(one["key"])
        if there is None:
            return True
        if all(there[part] == one[part] for part in ("payload", "token_ids", "tokens", "crc")):
            tiers = list(self.tiers)
            return tiers.index(there["tier"]) < tiers.index(tier)
        return bool(there["generation"] < one["generation"])

    def recover(self, tier: str, found: list[dict[str, Any]]) -> None:
        """`found`: key, payload, token_ids, tokens, crc, used, hits; least recent first."""
        rules = self.tiers[tier]
        for one in found:
            cost = rules.cost(one["payload"], one["token_ids"])
            pinned = self.used(tier)[0] - self.unpinned(tier)[0]
            pinned_entries = self.used(tier)[1] - self.unpinned(tier)[1]
            full = cost + pinned > rules.limit or (rules.cap and pinned_entries >= rules.cap)
            old = one["generation"] <= self.superseded.get(one["key"], -1)
            if old or full or not self.outlives(tier, one):
                self.emit("erase", tier, one["key"])
                continue
            room = True
            while self.used(tier)[0] + cost > rules.limit or (
                rules.cap and self.used(tier)[1] >= rules.cap
            ):
                victim = self.next_out(tier, one["key"], cost)
                if victim is None:
                    room = False
                    break
                self.leave(victim)
            if not room:
                self.emit("erase", tier, one["key"])
                continue
            if one["key"] in self.entries:
                self.leave(one["key"])
            if (save := self.saver_of(one["key"])) is not None:
                self.lose(save["token"], tell=True)
            self.entries[one["key"]] = {
                "key": one["key"],
                "generation": one["generation"],
                "token_ids": one["token_ids"],
                "tier": tier,
                "cost": cost,
                "payload": one["payload"],
                "tokens": one["tokens"],
                "crc": one["crc"],
                "pins": 0,
                "hits": one["hits"],
            }
            self.order[tier].append(one["key"])
            self.emit("put", one["key"])
