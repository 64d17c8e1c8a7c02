"""Golden scenarios: `scenarios/*.txt` hold commands and, below `----`, their exact output.

    PREFIXD_REWRITE=1 pytest tests/server/core/test_scenarios.py

writes the current output into the files. Commit only differences that you understand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixd.proto.entry import Content, EntryRecord
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import ClaimMode, SaveReason, SaveStatus, Tier
from prefixd.server.core import effects as an
from prefixd.server.core import effects as fx
from prefixd.server.core import events as ev
from prefixd.server.core.events import KeyToSave
from prefixd.server.core.state import MetaState
from prefixd.server.core.tables import StateConfig
from prefixd.tiers.eviction.lru import LRU
from prefixd.tiers.extents import ExtentAllocator
from prefixd.tiers.ledger import Ledger
from prefixd.tiers.store import StoredEntry

SCENARIOS = sorted((Path(__file__).parents[2] / "scenarios").glob("*.txt"))
MS = 1_000_000
UNITS = {"ms": MS, "s": 1_000 * MS}


def key_of(name: str) -> Key:
    return Key(name.encode().ljust(32, b"."))


def name_of(key: Key) -> str:
    return key.rstrip(b".").decode()


def span(ns: int) -> str:
    return f"{ns // MS}ms" if ns % UNITS["s"] else f"{ns // UNITS['s']}s"


def ns_of(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(ms|s)", text).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


class Arguments:
    """The words of a command: options (`name=value`), and the others in order."""

    def __init__(self, words: list[str]) -> None:
        self.options = dict(word.split("=", 1) for word in words if "=" in word)
        self.words = [word for word in words if "=" not in word]

    def ns(self, option: str, default: str) -> int:
        return ns_of(self.options.get(option, default))

    @property
    def numbers(self) -> list[int]:
        return [int(word) for word in self.words if word.isdigit()]


class Scenario:
    """The state of one daemon, its sessions by name, and a clock that only the file moves."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.ledgers: dict[Tier, Ledger] = {}
        self.limits: dict[str, int] = {}
        self.sessions: dict[str, int] = {}
        self.requests = 0
        self.granted: list[int] = []
        self._state: MetaState | None = None

    def run(self, line: str) -> list[str]:
        """Carry out one command. Returns the lines of its output."""
        command, *words = line.split()
        method: Callable[[Arguments], list[str] | None] = getattr(self, f"do_{command}")
        lines = method(Arguments(words)) or []
        if self._state is not None:
            lines += [f"PROBLEM: {problem}" for problem in self._state.check()]
        return lines

    @property
    def state(self) -> MetaState:
        """Created with the first event, when all tiers are known."""
        if self._state is None:
            same: Callable[[int, int], int] = lambda payload_bytes, _: payload_bytes  # noqa: E731
            self._state = MetaState(
                StateConfig(**self.limits),
                self.ledgers,
                dict.fromkeys(self.ledgers, same),
                frozenset({Tier.DISK}),
                stamp_ns=0,
            )
        return self._state

    def apply(self, event: ev.Event) -> list[str]:
        lines: list[str] = []
        self.granted = []
        for effect in self.state.apply(event):
            lines += self.describe(effect)
        return lines

    def ask(self) -> int:
        self.requests += 1
        return self.requests

    def who(self, arguments: Arguments) -> int:
        return self.sessions[arguments.words.pop(0)]

    # ---- commands: how things are

    def do_tier(self, a: Arguments) -> None:
        """tier NAME BYTES [max_entries=N] [secured=BYTES]: slabs of one byte, no overhead."""
        tier, budget = Tier[a.words[0].upper()], a.numbers[0]
        secured = int(a.options.get("secured", budget))
        self.ledgers[tier] = Ledger(
            tier,
            budget,
            LRU(budget),
            max_entries=int(a.options.get("max_entries", 0)),
            extents=None if tier is Tier.DISK else ExtentAllocator(secured, 1),
        )

    def do_limit(self, a: Arguments) -> None:
        """limit FIELD=N of StateConfig."""
        self.limits |= {name: int(value) for name, value in a.options.items()}

    def do_show(self, a: Arguments) -> list[str]:
        """show [tiers] [sessions]"""
        t = self.state.tables
        lines = []
        for tier, ledger in t.ledgers.items() if "sessions" not in a.words else ():
            victims = " ".join(name_of(key) for key in ledger.victims()) or "-"
            lines.append(
                f"{tier.label}: {ledger.published_bytes} published "
                f"({ledger.pinned_bytes} pinned) + {ledger.reserved_bytes} reserved "
                f"of {ledger.limit_bytes}; next to leave: {victims}"
            )
        for session in t.sessions.values() if "sessions" in a.words else ():
            claims = " ".join(map(str, sorted(session.claims))) or "-"
            tokens = " ".join(map(str, sorted(session.tokens))) or "-"
            lines.append(f"{session.owner}: claims {claims}, reservations {tokens}")
        if t.waiting:
            lines.append("waiting: " + " ".join(f"#{request}" for request in t.waiting))
        return lines

    def do_time(self, a: Arguments) -> None:
        """time SPAN: time passes without a tick."""
        self.now_ns += ns_of(a.words[0])

    def do_tick(self, a: Arguments) -> list[str]:
        """tick [SPAN] [flush]: time passes, then comes a tick."""
        self.now_ns += sum(ns_of(word) for word in a.words if word != "flush")
        return self.apply(ev.Tick(self.now_ns, flush="flush" in a.words))

    def do_deadline(self, _: Arguments) -> list[str]:
        due_ns = self.state.next_deadline_ns()
        return [f"in {span(due_ns - self.now_ns)}" if due_ns is not None else "none"]

    # ---- commands: sessions and reading

    def do_open(self, a: Arguments) -> list[str]:
        """open NAME"""
        owner, request = a.words[0], self.ask()
        lines = self.apply(ev.SessionOpened(request, owner, self.now_ns))
        self.sessions[owner] = self.state.tables.next_session - 1
        return lines

    def do_heartbeat(self, a: Arguments) -> list[str]:
        return self.apply(ev.HeartbeatCame(self.who(a), self.now_ns))

    def do_lost(self, a: Arguments) -> list[str]:
        """lost NAME: its connection broke."""
        return self.apply(ev.SessionLost(self.who(a), "its connection broke", self.now_ns))

    def do_lookup(self, a: Arguments) -> list[str]:
        """lookup KEY... [stop=yes] [wait=SPAN]"""
        keys, until_ns = tuple(map(key_of, a.words)), self.now_ns + a.ns("wait", "0s")
        stop = "stop" in a.options
        return self.apply(ev.LookupAsked(self.ask(), keys, stop, until_ns, self.now_ns))

    def do_claim(self, a: Arguments) -> list[str]:
        """claim NAME KEY... [mode=run] [lease=300s] [wait=SPAN]"""
        session, mode = self.who(a), ClaimMode[a.options.get("mode", "run").upper()]
        keys, lease_ns = tuple(map(key_of, a.words)), a.ns("lease", "300s")
        until_ns = self.now_ns + a.ns("wait", "0s")
        return self.apply(
            ev.ClaimAsked(self.ask(), session, keys, mode, lease_ns, until_ns, self.now_ns)
        )

    def do_release(self, a: Arguments) -> list[str]:
        """release NAME CLAIM..."""
        event = ev.ReleaseAsked(self.ask(), self.who(a), tuple(a.numbers), self.now_ns)
        return self.apply(event)

    def do_touch(self, a: Arguments) -> list[str]:
        return self.apply(ev.KeysTouched(tuple(map(key_of, a.words)), self.now_ns))

    def do_suspect(self, a: Arguments) -> list[str]:
        return self.apply(ev.KeysSuspected(tuple(map(key_of, a.words)), self.now_ns))

    def do_drop(self, a: Arguments) -> list[str]:
        """drop REQUEST: its caller hung up."""
        return self.apply(ev.RequestDropped(a.numbers[0], self.now_ns))

    # ---- commands: saving

    def reserve(self, a: Arguments, *, begin: bool) -> list[str]:
        session, tier = self.who(a), Tier[a.words.pop(0).upper()]
        items = [word.split(":") for word in a.words]
        return self.apply(
            ev.ReserveAsked(
                self.ask(),
                session,
                tier,
                SaveReason[a.options.get("reason", "cold").upper()],
                tuple(KeyToSave(key_of(name), Content(int(size), 1)) for name, size in items),
                tuple(key_of(name) for name in a.options.get("after", "").split(",") if name),
                begin,
                a.ns("ttl", "60s"),
                self.now_ns + a.ns("wait", "0s"),
                self.now_ns,
            )
        )

    def do_reserve(self, a: Arguments) -> list[str]:
        """reserve NAME TIER KEY:BYTES... [after=KEY,KEY] [ttl=60s] [wait=SPAN]"""
        return self.reserve(a, begin=False)

    def do_save(self, a: Arguments) -> list[str]:
        """save ...: reserve, then write and seal at once."""
        lines = self.reserve(a, begin=True)
        return lines + (self.seal(self.granted, wrong=False) if self.granted else [])

    def do_begin(self, a: Arguments) -> list[str]:
        """begin NAME TOKEN"""
        event = ev.WriteBegan(self.ask(), self.who(a), a.numbers[0], self.now_ns)
        return self.apply(event)

    def seal(self, tokens: list[int], *, wrong: bool) -> list[str]:
        crcs = (7,) * len(tokens)
        meant = (8,) * len(tokens) if wrong else crcs
        return self.apply(ev.WriteSealed(tuple(tokens), crcs, meant, self.now_ns))

    def do_seal(self, a: Arguments) -> list[str]:
        """seal TOKEN... [wrong]"""
        return self.seal(a.numbers, wrong="wrong" in a.words)

    def do_stop(self, a: Arguments) -> list[str]:
        """stop TOKEN OUTCOME"""
        outcome = SaveStatus[a.words[1].upper()]
        return self.apply(ev.WriteStopped(a.numbers[0], outcome, "it stopped", self.now_ns))

    def do_committed(self, a: Arguments) -> list[str]:
        return self.apply(ev.Committed(tuple(a.numbers), self.now_ns))

    def do_failed(self, a: Arguments) -> list[str]:
        """failed TOKEN... [full]"""
        full = "full" in a.words
        why = "no space left" if full else "the disk said no"
        return self.apply(ev.CommitFailed(tuple(a.numbers), full, why, self.now_ns))

    def do_cancel(self, a: Arguments) -> list[str]:
        """cancel NAME TOKEN..."""
        event = ev.CancelAsked(self.ask(), self.who(a), tuple(a.numbers), self.now_ns)
        return self.apply(event)

    # ---- commands: operators, stores, starts

    def do_evict(self, a: Arguments) -> list[str]:
        """evict BYTES TIER [MAX_ENTRIES]"""
        tier = Tier[a.words[1].upper()]
        most = a.numbers[1] if len(a.numbers) > 1 else 1_000
        return self.apply(ev.EvictAsked(self.ask(), tier, a.numbers[0], most, self.now_ns))

    def do_damaged(self, a: Arguments) -> list[str]:
        """damaged KEY [stale]: the entry, or an earlier entry of its key."""
        entry = self.state.tables.entries[key_of(a.words[0])]
        generation = entry.generation - ("stale" in a.words)
        return self.apply(ev.EntryDamaged(entry.key, generation, "a bit flipped", self.now_ns))

    def do_grown(self, a: Arguments) -> list[str]:
        """grown TIER BYTES"""
        tier = Tier[a.words[0].upper()]
        return self.apply(ev.ArenaGrown(tier, a.numbers[0], self.now_ns))

    def do_recovered(self, a: Arguments) -> list[str]:
        """recovered TIER KEY:BYTES@LAST_USED... [dropped=N]"""
        tier = Tier[a.words.pop(0).upper()]
        stored, end = [], 0
        for number, word in enumerate(a.words, start=100 * tier):
            name, size, used = re.split("[:@]", word)
            location = () if tier is Tier.DISK else (end, int(size))
            end += int(size)
            record = EntryRecord(
                key=key_of(name),
                tier=tier,
                reason=SaveReason.COLD,
                generation=number,
                created_ns=0,
                content=Content(int(size), 1),
                location=location,
                payload_crc32c=7,
            )
            stored.append(StoredEntry(record, int(used), hits=0))
        stored.sort(key=lambda one: one.last_used_ns)
        dropped = int(a.options.get("dropped", 0))
        lines = self.apply(ev.TierRecovered(tier, tuple(stored), dropped, self.now_ns))
        counters = self.state.tables.tier_counters[tier]
        return [
            *lines,
            f"{tier.label}: {counters.recovered_entries} entries are back, "
            f"{counters.dropped_at_start} were dropped",
        ]

    # ---- what is said

    def owner(self, session: int) -> str:
        return next(name for name, number in self.sessions.items() if number == session)

    def describe(self, effect: fx.Effect) -> list[str]:
        match effect:
            case fx.Reply(request, answer):
                return self.describe_answer(f"#{request}", answer)
            case fx.IndexPut(entries):
                return [f"+ {name_of(entry.key)} in {entry.tier.label}" for entry in entries]
            case fx.IndexDelete(entries):
                return [f"- {name_of(entry.key)}" for entry in entries]
            case fx.Erase(tier, entries):
                return [f"  {tier.label} erases {' '.join(name_of(e.key) for e in entries)}"]
            case fx.Commit(tier, tokens):
                return [f"  {tier.label} commits {' '.join(map(str, tokens))}"]
            case fx.StopWriting(token):
                return [f"  stop writing {token}"]
            case fx.SaveEnded(tokens, outcome, why):
                reason = f" ({why})" if why else ""
                return [f"  save {token}: {outcome.name.lower()}{reason}" for token in tokens]
            case fx.Verify(entry):
                return [f"  verify {name_of(entry.key)}"]
            case fx.RecordUsage(tier, usages):
                used = ", ".join(f"{name_of(usage.entry.key)} {usage.hits}x" for usage in usages)
                return [f"  {tier.label} records use: {used}"]
            case fx.TellClaimLost(session, claim, why):
                return [f"  tell {self.owner(session)}: claim {claim} is lost, {why}"]
            case fx.TellReservationLost(session, token, key, why):
                name = name_of(key)
                return [f"  tell {self.owner(session)}: reservation {token} of {name}, {why}"]

    def describe_answer(self, head: str, answer: an.Answer) -> list[str]:
        match answer:
            case an.Refused(error):
                retry = "may succeed later" if error.retryable else "never will"
                return [f"{head} refused: {error.name}: {error} [{retry}]"]
            case an.Opened(session):
                return [f"{head} session {session}"]
            case an.LookupAnswer(results):
                return [f"{head} {', '.join(map(found, results))}"]
            case an.ClaimAnswer(claim, lease_ns, results, claimed):
                seen = zip(results, claimed, strict=True)
                parts = [f"{found(one)}{' *' if mine else ''}" for one, mine in seen]
                claim_name = f"claim {claim} for {span(lease_ns)}" if claim else "no claim"
                return [f"{head} {claim_name}: {', '.join(parts)}"]
            case an.ReleaseAnswer(results):
                return [f"{head} {', '.join(one.name.lower() for one in results)}"]
            case an.ReserveAnswer(_, results):
                return [f"{head} {', '.join(map(self.reserved, results))}"]
            case an.CancelAnswer(results):
                return [f"{head} {', '.join('cancelled' if one else 'no' for one in results)}"]
            case an.WriteOrder():
                return [f"{head} write {self.reserved(answer)}"]
            case an.EvictAnswer(entries, freed_bytes, more):
                end = "" if more else ", that was all"
                return [f"{head} evicted {entries}, {freed_bytes} bytes{end}"]

    def reserved(self, one: an.Reserved) -> str:
        if isinstance(one, an.WriteOrder):
            self.granted.append(one.token)
            place = f" at {one.entry.location}" if one.entry.location else ""
            return f"{name_of(one.key)} = {one.token}{place}"
        return one.name.lower() if isinstance(one, SaveStatus) else found(one)


def found(one: an.Found) -> str:
    if one is None:
        return "absent"
    if isinstance(one, an.FlightInfo):
        return f"in flight by {one.owner} for {span(one.age_ns)}"
    return f"{name_of(one.key)} in {one.tier.label}"


def rendered(text: str) -> str:
    """The file with the current output of every block of commands."""
    scenario = Scenario()
    blocks = []
    for block in text.strip().split("\n\n"):
        commands = block.split("\n----")[0]
        said: list[str] = []
        lines = [line for line in commands.split("\n") if not line.startswith("#")]
        for line in lines:
            said += scenario.run(line)
        blocks.append("\n".join([commands, "----", *said]) if lines else commands)
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    text = path.read_text()
    now = rendered(text)
    if os.environ.get("PREFIXD_REWRITE"):
        path.write_text(now)
        text = now
    assert now == text
    assert "PROBLEM" not in now


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 11
