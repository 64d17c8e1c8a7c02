"""Every table of `prefixctl` at the widths of terminals: nothing is cut or lost."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Group, RenderableType
from typer.testing import CliRunner

from prefixd.client import ctl
from prefixd.client.ctl import main, targets
from prefixd.client.ctl.views import lab, live, operators
from prefixd.client.ctl.views import model_identity as identity_views
from prefixd.client.ctl.views import stats as stats_views
from prefixd.client.ctl.views.text_tables import MANY_ROWS, FittedTable
from prefixd.client.ctl.views.top import Interval
from prefixd.client.identity import Dimension, Part, StateIdentity, differences, unrevealed
from prefixd.client.lab.live_replay import Totals
from prefixd.client.lab.replayer import RequestOutcome
from prefixd.client.lab.trace import write_trace
from prefixd.client.lab.workloads import generate
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import DaemonUnavailable
from prefixd.proto.vocabulary import SaveStatus
from tests.client.ctl.views.test_text_tables import drawn

WIDTHS = [80, 100, 200]
#: Wide enough for every table in one piece.
WHOLE = 600
TIB, PIB = 2**40, 2**50
MANY = 987_654_321_012
NOW_NS = 1_800_000_000 * 10**9
OWNER = "vllm-worker-0 (pid 4194303 on node-17.rack-3.example)"
LABEL = "team-a/meta-llama-3.1-405b-instruct"
KEY = bytes(range(200, 232))
#: The characters of lines and bars, whose length depends on the width.
DRAWN = set("━─ ")


def tier(number: int) -> pb.TierStats:
    """A tier with numbers near the largest possible."""
    return pb.TierStats(
        tier=pb.Tier.ValueType(number), policy=pb.EVICTION_POLICY_S3FIFO, budget_bytes=900 * TIB,
        secured_bytes=899 * TIB, kept_bytes=99 * TIB, published_bytes=800 * TIB,
        reserved_bytes=9 * TIB, pinned_bytes=7 * TIB, entries=987_654_321,
        max_entries=999_999_999, hits=MANY, hit_tokens=512 * MANY, read_bytes=900 * TIB,
        saves=MANY, saved_bytes=PIB, evictions=MANY, evicted_bytes=PIB, corrupt=12_345,
        recovered_entries=987_654_321, recovered_bytes=500 * TIB, dropped_at_start=1_234_567,
        limit_bytes=899 * TIB, state=pb.TIER_STATE_RECOVERING, oldest_io_ms=98_765,
        scrub=pb.ScrubStats(entries=5, payload_bytes=77 * TIB, passes=12, unreadable_entries=4),
        namespaces=[
            pb.NamespaceStats(
                namespace=name, share_bytes=300 * TIB, used_bytes=299 * TIB,
                fixed_bytes=88 * TIB, entries=987_654_321,
            )
            for name in ("n" * 32, "")
        ],
    )  # fmt: skip


def usage(scale: int) -> pb.Usage:
    tiers = [
        pb.TierUsage(
            tier=pb.Tier.ValueType(number),
            hit_tokens=scale // 4,
            restored_bytes=dict.fromkeys(("view", "copy", "stream"), 9 * TIB),
        )
        for number in (1, 2, 3)
    ]
    return pb.Usage(
        lookups=scale, hits=scale // 2, lookup_tokens=scale, restored_tokens=scale // 2,
        misses=dict.fromkeys(stats_views.MISS_WORDS, scale // 24), tiers=tiers,
        failures=dict.fromkeys(stats_views.MISS_WORDS, scale // 24),
        missed=[
            *(
                pb.Missed(
                    reason=pb.MISS_REASON_EVICTED, tier=tier, cause=why,
                    tokens=scale // 24, lookups=3,
                )
                for tier in pb.Tier.values() for why in pb.EvictionCause.values() if tier and why
            ),
            *(
                pb.Missed(reason=why, tokens=scale // 99, lookups=1)
                for why in (pb.MISS_REASON_TOO_OLD, pb.MISS_REASON_SLOW)
            ),
        ],
    )  # fmt: skip


def statistics(scale: int = 4) -> pb.StatsResponse:
    nodes = [
        pb.SharedNode(
            name=f"valkey-{number}.valkey.prefixd.svc.cluster.local:6379",
            state=state, why=why_it_is, requests=MANY, unanswered=7, refused=3,
        )
        for number, (state, why_it_is) in enumerate(
            [
                (pb.SHARED_NODE_STATE_SERVING, ""),
                (pb.SHARED_NODE_STATE_RESTING, "it missed 3 deadlines of 20 ms within a second"),
            ]
        )
    ]  # fmt: skip
    stages = [
        pb.StageTimes(stage=name, bounds_ns=[50_000, 2_000_000], times=[scale, 2 * scale, scale])
        for name in ("claim", "save", "commit disk", "loop")
    ]
    return pb.StatsResponse(
        daemon_version="1.23.45", incarnation=b"i", uptime_ms=10**10, pid=4194303, health="serving",
        tiers=[tier(1), tier(2), tier(3)], sessions=16_384, claims=987_654, reservations=65_536,
        waiters=65_536, usage={LABEL: usage(scale * MANY), "qwen": usage(scale * 1000)},
        notices={"disk tier": "recovers: 240,000 entries adopted"}, oldest_claim_ms=10**8,
        counters={"prefixd_reservations_lost_total": MANY, "prefixd_lookups_total": MANY},
        in_flight={"staging_bytes": MANY}, shared=dict.fromkeys(SHARED, MANY), shared_nodes=nodes,
        stages=stages,
    )  # fmt: skip


SHARED = (
    "fetches", "fetched_entries", "fetched_bytes", "unavailable", "damaged", "second_asked",
    "second_came", "bucket_fetched", "bucket_offered", "bucket_missed", "offered_entries",
    "offered_bytes", "refused", "offers_dropped", "touched",
    "withdrawn", "deletes_learned", "unvouched", "too_short", "unanswered",
    "waiting_offers", "waiting_withdrawals", "waiting_deletes", "nodes", "nodes_serving",
)  # fmt: skip


def entry(number: int) -> pb.EntryDetail:
    info = pb.EntryInfo(
        tier=pb.TIER_DISK, generation=NOW_NS, payload_bytes=15 * 2**30, token_count=131_072,
        payload_crc32c=0xDEADBEEF, layer_count=126, token_ids_bytes=2**19,
        reason=pb.SAVE_REASON_CONTINUED,
    )  # fmt: skip
    return pb.EntryDetail(
        key=KEY[:31] + bytes([number]), info=info, stored_bytes=15 * 2**30, hits=MANY, pins=99_999,
        created_unix_ns=NOW_NS - 10**15, last_used_unix_ns=NOW_NS - 10**14,
        extents=[2**40, 2**30, 2**41, 2**30], namespace=LABEL,
    )  # fmt: skip


def session(number: int) -> pb.SessionDetail:
    return pb.SessionDetail(
        session_id=10**9 + number, owner=OWNER, age_ms=10**9, heartbeat_age_ms=1999, claims=65_536,
        reservations=4096, label=LABEL, lookups=MANY, hits=MANY, restored_bytes=PIB, saves=MANY,
        saved_bytes=PIB,
    )  # fmt: skip


def board() -> Interval:
    made = Interval("unix:/run/prefixd/prefixd.sock")
    claim = pb.ClaimDetail(claim_id=MANY, session_id=10**9, owner=OWNER, entries=5, age_ms=10**8)
    for at_s, scale in ((1.0, 4), (3.0, 8)):
        made.take(statistics(scale), [claim], at_s)
    return made


def fleet_board() -> targets.FleetBoard:
    addresses = [f"node-{number}.rack-3.example:7070" for number in range(3)]
    made = targets.FleetBoard(addresses)
    for at_s, scale in ((1.0, 4), (3.0, 8)):
        answers: dict[str, Any] = dict.fromkeys(addresses[:2], statistics(scale))
        made.take({**answers, addresses[2]: DaemonUnavailable("nobody answers there")}, at_s)
    return made


def totals() -> Totals:
    found = Totals(wall_seconds=2.0, rpcs=Counter(Claim=3_000_000, SaveStaged=4_000_000))
    found.add(
        RequestOutcome(
            prompt_tokens=MANY,
            hit_tokens=MANY // 2,
            saves=Counter({status.label: 12_345_678 for status in SaveStatus}),
            saved_bytes=PIB,
            verified_bytes=PIB,
            durations_ns={"walk": 1_000_000, "claim": 9_876_543_210, "save": 2_500_000},
        )
    )
    return found


def live_curve_data() -> dict[str, Any]:
    points = [
        {"budget_bytes": n * 300 * 2**30, "times_budget": n / 4, "hit_tokens": MANY,
         "hit_rate": n / 20} for n in range(1, 17)
    ]  # fmt: skip
    row = {
        "policy": "s3fifo", "budget_bytes": 900 * 2**30, "total_tokens": MANY, "hit_rate": 0.5,
        "points": points, "sampled_keys": 987_654, "sample_rate": 0.00123,
    }  # fmt: skip
    return {"tiers": [{"tier": name, **row} for name in ("ram", "shm", "disk")]}


def events() -> pb.WhyResponse:
    said = [
        pb.KeyEvent(
            key=KEY[:16], what=pb.KEY_EVENT_KIND_EVICTED, cause=pb.EVICTION_CAUSE_PRESSURE,
            tier=pb.TIER_DISK, owner=OWNER,
            at_unix_ns=NOW_NS - n * 10**13, session_id=10**9, label=LABEL,
        )
        for n in range(3)
    ]  # fmt: skip
    shared = pb.SharedEvent(
        key=KEY[:16],
        what=pb.SHARED_EVENT_KIND_OFFERED,
        node="valkey-1.example:6379",
        at_unix_ns=1,
    )
    return pb.WhyResponse(
        events=said, shared=[shared], present=[entry(1)], remembered_events=95_000,
        remembered_since_unix_ns=NOW_NS - 10**15,
    )  # fmt: skip


def from_lab(directory: Path) -> dict[str, RenderableType]:
    """What the commands over traces show of their own results."""
    trace = directory / "trace.jsonl"
    write_trace(trace, list(generate("multi-turn", requests=60, seed=3)))

    def data(*arguments: object) -> Any:
        command = [str(argument) for argument in (*arguments, "--json")]
        result = CliRunner().invoke(main.app, command)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    capacities = ("--capacity-blocks", "10,100,987654321")
    replayed = data(
        "replay",
        trace,
        "--prefill-tokens-per-s",
        "8000",
        "--gpu-hour",
        "2",
        "--over-time",
        "3",
        *capacities,
        "--block-bytes",
        "5MiB",
    )
    for row in replayed["results"]:  # as large as the numbers of a real trace get
        row.update(total_hit_tokens=MANY, evictions=MANY, final_cache_blocks=987_654_321)
    curve = data("curve", trace, "--sample-rate", "0.5", *capacities, "--block-bytes", "5MiB")
    moved = data("simulate", trace, "--shared-blocks", 9, "--peer-reads", "--compare")
    written = directory / "made.jsonl"
    made = data("trace", "generate", "--profile", "multi-turn", "-o", written, "--requests", 20)
    return {
        "lab.worth_table": lab.worth_table(replayed["results"], 5 * 2**20),
        "lab.parts_table": lab.parts_table(replayed["results"], "over_time"),
        "lab.replay_view": lab.replay_view(replayed, 5 * 2**20),
        "lab.results_table": lab.results_table(replayed["results"]),
        "lab.curve_view": lab.curve_view(curve),
        "lab.formats_view": lab.formats_view([{"name": "f", "about": "a", "example": ["{}"]}]),
        "lab.analysis": lab.analysis(data("analyze", trace)),
        "lab.advice": lab.advice(
            data("advise", trace, "--bytes-per-token", "128KiB", "--hit-rate", "0.4")
        ),
        "lab.written": lab.written({**made, "output": "a trace of somewhere.jsonl"}),
        "lab.fleet_view": lab.fleet_view(moved),
    }


def of_daemons() -> dict[str, RenderableType]:
    """What the commands over daemons show."""
    stats, sessions = statistics(), [session(1), session(2)]
    before = [pb.SessionDetail(session_id=each.session_id) for each in sessions]
    claim = pb.ClaimDetail(
        claim_id=MANY, session_id=10**9, owner=OWNER, age_ms=10**9, lease_left_ms=10**7,
        payload_bytes=PIB, entries=65_536,
    )  # fmt: skip
    reservation = pb.ReservationDetail(
        key=KEY, session_id=10**9, owner=OWNER, tier=pb.TIER_DISK, stage=pb.SAVE_STAGE_COMMITTING,
        age_ms=10**9, ttl_left_ms=10**7, payload_bytes=PIB, stored_bytes=PIB, waiters=65_536,
    )  # fmt: skip
    verified = pb.VerifyResponse(entries=MANY, damaged_entries=3, problems=["entry 1: bad"])
    preview = pb.PreviewResponse(
        admissible=True, message="after evictions", victims=[entry(1), entry(2)],
        evicted_bytes=PIB, needed_bytes=PIB, free_bytes=PIB, unpinned_bytes=PIB, pinned_bytes=PIB,
    )  # fmt: skip
    rows = [("ram", MANY, PIB), ("disk", MANY, PIB)]
    rates = operators.session_rates(sessions, before, 2.0)
    return {
        "operators.changed_table": operators.changed_table(
            [
                pb.ChangedOption(option=option, running="65,536", configured="131,072", live=False)
                for option in ("sessions.max_reservations_per_session", "server.staging_total")
            ],
            "changed",
        ),
        "targets.FleetBoard": fleet_board().__rich__(),
        "targets.stats_view": targets.stats_view(fleet_board().answers),
        "live.live_view": live.live_view(live_curve_data()),
        "operators.check_view": operators.check_view(
            pb.CheckResponse(problems=["bytes do not add up"], problem_count=9, entries=MANY)
        ),
        "operators.claims_table": operators.claims_table([claim]),
        "operators.cleared_view": operators.cleared_view(
            LABEL,
            pb.ClearResponse(
                entries=MANY, pinned_entries=MANY, unknown_entries=MANY, erasing=True
            ),
        ),
        "operators.counters_table": operators.counters_table(stats.counters),
        "operators.drained_view": operators.drained_view(
            pb.DrainResponse(claims=MANY, reservations=MANY, calls=MANY), stop=True
        ),
        "operators.entries_table": operators.entries_table(
            [entry(1), entry(2)], NOW_NS, "disk: 2 of 9"
        ),
        "operators.entry_view": operators.entry_view(
            pb.InspectResponse(entry=entry(1), problem="CRC32C differs"), NOW_NS, verify=True
        ),
        "operators.evicted_table": operators.evicted_table(rows, dry_run=True),
        "operators.gc_table": operators.gc_table(pb.GcResponse(expired_claims=MANY)),
        "operators.preview_view": operators.preview_view(preview, "disk", NOW_NS),
        "operators.reservations_table": operators.reservations_table([reservation]),
        "operators.resized_view": operators.resized_view(
            "ram", pb.ResizeResponse(budget_bytes=PIB, entries=MANY, freed_bytes=PIB, kept_bytes=9)
        ),
        "operators.verify_view": operators.verify_view(verified),
        "live.totals_view": live.totals_view(totals(), "live replay of a trace"),
        "lab.recorded_view": lab.recorded_view(
            {
                "output": [f"/var/lib/prefixd/traces/of-{n}.jsonl.gz" for n in range(3)],
                "requests": MANY, "seconds": 86_400.5, "prompt_tokens": 512 * MANY,
                "blocks": 32 * MANY, "hit_blocks": 31 * MANY, "most_recording_sessions": 16_384,
            }
        ),
        "operators.sessions_table": operators.sessions_table(sessions, rates, 2.0),
        "stats.activity_table": stats_views.activity_table(stats),
        "stats.budget_table": stats_views.budget_table(stats),
        "stats.namespaces_table": stats_views.namespaces_table(stats.tiers[0]),
        "stats.shared_nodes_table": stats_views.shared_nodes_table(stats.shared_nodes),
        "stats.stats_view": stats_views.stats_view(stats, "unix:/run/prefixd/prefixd.sock"),
        "top.Interval": board().__rich__(),
        "stats.failures_table": stats_views.failures_table(stats.usage[LABEL].failures),
        "stats.labels_table": stats_views.labels_table(stats),
        "stats.missed_table": stats_views.missed_table(stats.usage[LABEL]),
        "operators.why_view": operators.why_view("c8c9", events(), NOW_NS),
    }  # fmt: skip


def of_identities() -> dict[str, RenderableType]:
    """What `prefixctl identity` and `inspect` show of what keys depend on."""
    one, other = (
        StateIdentity(
            "vLLM 0.33.0+cu129",
            (
                Dimension(
                    "weights", KEY, "SHA-256 of 191 files, hub commit c8c9", Part.FINGERPRINT
                ),
                Dimension("cache dtype", dtype, "cache_config.cache_dtype", Part.QUANTISATION),
                Dimension("rope", f'{{"rope_theta": {theta}}}', "hf_config.rope", Part.CONTEXT),
                unrevealed("adapters", "give adapters=", Part.ADAPTERS),
            ),
        )
        for dtype, theta in (("fp8_e4m3", 10_000.0), ("fp8_e5m2", 500_000.0))
    )
    sent = [
        pb.Identity(digest=each.digest, engine=each.engine, words=each.announcement()[1])
        for each in (one, other)
    ]
    announced = [
        pb.AnnouncedIdentity(identity=sent[n % 2], session_id=n, owner=OWNER, label=LABEL)
        for n in range(9)
    ]
    return {
        "model_identity.identities_table": identity_views.identities_table(announced),
        "model_identity.identity_view": identity_views.identity_view(one),
        "model_identity.differences_view": identity_views.differences_view(
            one, other, differences(one, other)
        ),
        "model_identity.saver_view": identity_views.saver_view(sent),
    }


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RenderableType]:
    return {**of_daemons(), **of_identities(), **from_lab(tmp_path_factory.mktemp("traces"))}


def words(text: str) -> Counter[str]:
    return Counter(word for word in text.split() if not set(word) <= DRAWN)


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_or_lost(views: dict[str, RenderableType], width: int) -> None:
    for name, view in views.items():
        whole, text = drawn(view, WHOLE), drawn(view, width)
        assert "…" not in text, name
        assert max(map(len, text.splitlines())) <= width, name
        lost = words(whole) - words(text)
        assert not lost, (name, lost)


def test_every_row_says_which_it_is(views: dict[str, RenderableType]) -> None:
    """Also in each part of a table that was split."""
    for name, view in views.items():
        for table in tables_of(view):
            rows = list(zip(*(map(str, column.cells) for column in table.columns), strict=True))
            named = [row[: table.name_columns] for row in rows]
            assert len(set(named)) == len(set(rows)), (name, named)


def test_a_long_table_looks_like_a_short_one() -> None:
    """Its rows are not drawn by Rich, but with the same styles and blanks."""
    for width in WIDTHS:
        few, many = (
            drawn(entries(count), width, force_terminal=True).splitlines()
            for count in (MANY_ROWS, MANY_ROWS + 1)
        )
        begin = many.index(few[4])
        assert many[: begin + MANY_ROWS] == few[: begin + MANY_ROWS]
        assert len(many) - len(few) in (1, 2, 3), "one row more in each part"


def entries(count: int) -> RenderableType:
    return operators.entries_table([entry(n) for n in range(count)], NOW_NS, "some")


@pytest.mark.parametrize("name", ["[/]", "[red]x[/red]", ":smile:", "a\x1b[2J\x07b", "\u202e"])
def test_names_that_clients_give_are_shown_as_they_are(name: str) -> None:
    """Except for characters that a terminal might take for a command."""
    one = pb.SessionDetail(session_id=1, owner=name, label=name)
    text = drawn(operators.sessions_table([one], operators.session_rates([one], [], 0.0), 0.0), 200)
    shown = "".join(each if each.isprintable() else "?" for each in name)
    assert text.count(shown) == 2
    assert "\x1b" not in text


def tables_of(view: RenderableType) -> Iterator[FittedTable]:
    if isinstance(view, FittedTable):
        yield view
    elif isinstance(view, Group):
        for part in view.renderables:
            yield from tables_of(part)


def test_no_table_is_left_out(views: dict[str, RenderableType]) -> None:
    """Every public function of `prefixctl` that returns something to show is called here."""
    made = set()
    for module in pkgutil.walk_packages(ctl.__path__, f"{ctl.__name__}."):
        loaded = importlib.import_module(module.name)
        for name, function in inspect.getmembers(loaded, inspect.isfunction):
            shows = str(function.__annotations__.get("return")) in ("Table", "RenderableType")
            if function.__module__ == loaded.__name__ and shows and not name.startswith("_"):
                made.add(f"{module.name.rpartition('.')[2]}.{name}")
    assert made - {"text_tables.make_table", "text_tables.pairs_table"} <= views.keys()
