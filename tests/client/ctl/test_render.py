"""What the daemon says, as tables for people."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from prefixd.client.ctl import render
from prefixd.client.ctl.stats_view import stats_view
from prefixd.proto import prefixd_pb2 as pb

KEY = bytes(range(32))
SECOND = 1_000_000_000


def drawn(
    view: RenderableType,
    width: int = 100,
    *,
    encoding: str = "utf-8",
    force_terminal: bool = False,
) -> str:
    """As a terminal of that width would show it, with or without its colours and styles."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(
        file=file, width=width, no_color=not force_terminal, force_terminal=force_terminal
    ).print(view)
    file.flush()
    file.seek(0)
    return file.read()


def tier_stats(tier: pb.Tier.ValueType = pb.TIER_RAM, **numbers: int) -> pb.TierStats:
    return pb.TierStats(tier=tier, policy="lru", budget_bytes=1000, secured_bytes=1000, **numbers)


def entry(**fields: int) -> pb.EntryDetail:
    info = pb.EntryInfo(
        tier=pb.TIER_SHM, payload_bytes=4096, token_count=512, reason=pb.SAVE_REASON_COLD
    )
    return pb.EntryDetail(key=KEY, info=info, stored_bytes=8192, **fields)


# ---- numbers


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0B"), (999, "999B"), (4096, "4KiB"), (33_492_000, "31.9MiB"), (2**40, "1TiB"),
     (1000 * 2**30, "0.977TiB"), (2**50, "1PiB")],
)  # fmt: skip
def test_sizes_are_short(count: int, text: str) -> None:
    assert render.size(count) == text


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [(-5, "0s"), (0, "0s"), (850_900_000, "850ms"), (SECOND, "1s"), (184 * SECOND + 7, "3m4s")],
)
def test_ages_are_rough(duration_ns: int, text: str) -> None:
    assert render.age(duration_ns) == text


def test_nothing_of_nothing_has_no_percentage() -> None:
    assert render.percent(0, 0) == "-"
    assert render.percent(1, 8) == "12.5 %"


# ---- bars


def cells(bar: render.Bar, width: int, full: str = "━") -> int:
    return drawn(bar, width).count(full)


@pytest.mark.parametrize(
    ("part", "expected"), [(0, 0), (1, 1), (500, 5), (501, 6), (999, 10), (1000, 10), (2000, 10)]
)
def test_a_bar_shows_how_full(part: int, expected: int) -> None:
    """A byte is seen, and a tier is not shown full before it is nearly so."""
    assert cells(render.Bar(1000, [(part, "red")], max_width=10), 40) == expected


def test_the_parts_of_a_bar_add_up() -> None:
    tier = tier_stats(published_bytes=600, pinned_bytes=200, reserved_bytes=100)
    assert cells(render.Bar.of_tier(tier, 10), 40) == 7
    assert cells(render.Bar.of_tier(tier_stats(), 10), 40) == 0


def test_a_bar_fits_where_it_is_put_and_needs_no_unicode() -> None:
    bar = render.Bar(1000, [(500, "red")], max_width=30)
    assert drawn(bar, 8).strip("\n") == "━━━━────"
    assert drawn(bar, 8, encoding="ascii").strip("\n") == "####----"


# ---- tables


def stats() -> pb.StatsResponse:
    return pb.StatsResponse(
        daemon_version="1.2.3",
        pid=7,
        health="serving",
        tiers=[
            tier_stats(entries=3, published_bytes=500, saves=3, max_entries=9),
            tier_stats(pb.TIER_SHM, recovered_entries=5, dropped_at_start=2, corrupt=1),
        ],
        usage={
            "llama": pb.Usage(
                lookups=10,
                hits=9,
                misses={"absent": 1},
                failures={"lost": 2},
                lookup_tokens=5000,
                restored_tokens=4000,
                tiers=[pb.TierUsage(tier=pb.TIER_RAM, hit_tokens=4100, restored_bytes={"copy": 7})],
            ),
            "qwen": pb.Usage(lookups=10, hits=1, misses={"absent": 2, "unavailable": 7}),
        },
    )


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_statistics_fit_the_terminal(width: int) -> None:
    lines = drawn(stats_view(stats(), "unix:/x"), width).splitlines()
    assert max(map(len, lines)) <= width


def test_the_statistics_say_what_there_is() -> None:
    text = drawn(stats_view(stats(), "unix:/x"), 120)
    for word in ("1.2.3  serving", "serving", "pid 7", "unix:/x", "50.0 %", "3 of 9"):
        assert word in text
    compiled = stats()
    compiled.compiled = True
    assert "1.2.3, compiled  serving" in drawn(stats_view(compiled, "unix:/x"), 120)
    assert "shm: 5 entries (0B) came back at the start, 2 were dropped" in text
    assert "shm: 1 entries were damaged and dropped" in text
    lines = [line.split() for line in text.splitlines()]
    assert text.splitlines()[1] == "hit ratio  82.0 % of 5,000 tokens, 50.0 % of 20 look-ups"
    assert "restored   4,000 tokens: 7B by copy" in text
    assert ["llama", "82.0", "%", "90.0", "%", "10", "4,100"] in lines
    assert [line[:4] for line in lines if line[:1] == ["unavailable"]] == [
        ["unavailable", "7", "35.0", "%"]
    ]
    assert [line[:2] for line in lines if line[:1] == ["lost"]] == [["lost", "2"]]


def test_labels_that_nothing_was_counted_under_are_not_shown() -> None:
    """Each namespace of a token has one."""
    told = stats()
    told.usage["team-a"].CopyFrom(pb.Usage())
    assert "team-a" not in drawn(stats_view(told, "unix:/x"), 120)
    del told.usage["qwen"]
    text = drawn(stats_view(told, "unix:/x"), 120)
    assert "llama" not in text, "there is but one"


def test_what_was_read_back_is_said_in_a_sentence() -> None:
    told = pb.StatsResponse(tiers=[tier_stats(pb.TIER_DISK, entries=1, saves=1)])
    told.tiers[0].scrub.CopyFrom(
        pb.ScrubStats(entries=3, payload_bytes=2**20, passes=2, progress_permille=250)
    )
    text = drawn(stats_view(told, "unix:/x"), 120)
    assert "disk: 1MiB read back in the background, 2 times through, 25% of this time" in text


def test_without_look_ups_there_is_no_ratio() -> None:
    assert "no look-ups were reported yet" in drawn(stats_view(pb.StatsResponse(), "unix:/x"))


def test_a_narrow_table_keeps_every_column_whole() -> None:
    """What does not fit comes below, with the first column again."""
    names = [f"column {number}" for number in range(9)]
    table = render.make_table("key", *names, right=names)
    cells = [f"{number}" * 12 for number in range(9)]
    table.add_row("k" * 16, *cells)
    for width in (40, 80, 100, 200):
        text = drawn(table, width)
        assert max(map(len, text.splitlines())) <= width
        assert all(cell in text for cell in [*names, *cells])
        assert "…" not in text
    assert drawn(table, 200).count("k" * 16) == 1
    assert drawn(table, 80).count("k" * 16) > 1


def test_an_entry_says_everything() -> None:
    response = pb.InspectResponse(
        entry=entry(hits=3, pins=1, created_unix_ns=SECOND, last_used_unix_ns=3 * SECOND)
    )
    response.entry.extents.extend([4096, 8192])
    text = drawn(render.entry_view(response, 5 * SECOND, verify=False))
    assert KEY.hex() in text
    for words in ("8KiB at 4096", "4s ago", "2s ago", "cold", "no layer table"):
        assert words in text
    assert "verified" not in text


def test_verification_is_told_either_way() -> None:
    good = pb.InspectResponse(entry=entry(), verified=True)
    bad = pb.InspectResponse(entry=entry(), verified=True, problem="CRC32C differs")
    assert "every byte matches" in drawn(render.entry_view(good, 0, verify=True))
    assert "CRC32C differs" in drawn(render.entry_view(bad, 0, verify=True))


def test_lists_name_owners_and_times() -> None:
    claims = drawn(
        render.claims_table(
            [pb.ClaimDetail(claim_id=4, owner="vllm", keys=[KEY], age_ms=1500, lease_left_ms=9000)]
        )
    )
    assert all(word in claims for word in ("vllm", "1s", "9s"))
    reservations = drawn(
        render.reservations_table(
            [pb.ReservationDetail(key=KEY, owner="sglang", stage="writing", waiters=3)]
        )
    )
    assert all(word in reservations for word in ("sglang", "writing", KEY.hex()[:16]))


def test_empty_lists_say_so() -> None:
    assert drawn(render.claims_table([])).strip() == "no claims"
    assert drawn(render.reservations_table([])).strip() == "no reservations"


@pytest.mark.parametrize(
    ("admissible", "retryable", "verdict"),
    [(True, False, "admissible"), (False, True, "not now, but later"), (False, False, "never")],
)
def test_a_preview_has_a_verdict(admissible: bool, retryable: bool, verdict: str) -> None:
    preview = pb.PreviewResponse(
        admissible=admissible, retryable=retryable, message="because", victims=[entry()]
    )
    text = drawn(render.preview_view(preview, "shm", 0))
    assert f"shm: {verdict}" in text
    assert "because" in text
    assert "would evict 1 entries" in text


def test_a_check_lists_its_problems() -> None:
    bad = pb.CheckResponse(problems=["bytes do not add up"], entries=3)
    assert "- bytes do not add up" in drawn(render.check_view(bad))
    assert "everything adds up: 3 entries" in drawn(render.check_view(pb.CheckResponse(entries=3)))


def test_what_is_less_than_it_could_be_is_shown() -> None:
    recovering = tier_stats(pb.TIER_DISK)
    recovering.state = "recovering"
    said = {"disk tier": "recovers: 240,000 entries adopted"}
    stats = pb.StatsResponse(tiers=[tier_stats(), recovering], notices=said, health="serving")
    shown = drawn(stats_view(stats, "unix:/s"), 120)
    assert "disk tier: recovers: 240,000 entries adopted" in shown
    assert shown.count("(recovering)") == 1


def test_a_verification_says_how_far_it_came_and_what_is_wrong() -> None:
    good = pb.VerifyResponse(entries=3, payload_bytes=4096, progress_permille=1_000, done=True)
    assert "every byte is right: 3 entries (4KiB) verified" in drawn(render.verify_view(good))
    stopped = pb.VerifyResponse(entries=3, payload_bytes=4096, progress_permille=250)
    assert drawn(render.verify_view(stopped)).startswith("stopped at 25%: 3 entries")
    bad = pb.VerifyResponse(
        entries=3, damaged_entries=2, unreadable_entries=1, problems=["entry 12: bad"], done=True
    )
    text = drawn(render.verify_view(bad))
    assert "3 problems in 3 entries (0B) verified, 2 damaged and dropped, 1 could not be" in text
    assert "- entry 12: bad" in text
    assert "... and 2 more" in text


@pytest.mark.parametrize("width", [80, 100, 200])
def test_what_namespaces_take_is_shown(width: int) -> None:
    stats = pb.StatsResponse()
    tier = stats.tiers.add(tier=pb.TIER_RAM, policy="lru", budget_bytes=2**30)
    tier.namespaces.add(used_bytes=2**20, entries=12_345)
    tier.namespaces.add(
        namespace="n" * 32, share_bytes=2**29, used_bytes=2**28, fixed_bytes=2**20, entries=7
    )
    text = drawn(stats_view(stats, "unix:/x"), width)
    assert "(no share)" in text
    assert "n" * 32 in text
    for number in ("512MiB", "256MiB", "12,345"):
        assert number in text


# ---- views that are drawn again and again


def test_a_terminal_is_drawn_over_and_a_pipe_gets_every_view() -> None:
    texts = ["first", "second", "third"]
    for terminal in (True, False):
        file = io.StringIO()
        to = Console(file=file, force_terminal=terminal, width=100)
        views = iter(texts)
        with render.live_view(to, lambda views=views: Text(next(views))) as refresh:  # type: ignore[misc]
            refresh()
            refresh()
        assert all(text in file.getvalue() for text in texts)
        assert ("\x1b[" in file.getvalue()) is terminal
