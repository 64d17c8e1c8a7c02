"""The model itself: its defaults, and that a configuration is immutable."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from prefixd.proto import limits
from prefixd.server.config.options import Config, RamSection, SessionsSection
from prefixd.server.core.tables import StateConfig


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RamSection.model_validate({}).policy = "fifo"


def test_the_defaults_of_sessions_are_those_that_clients_know() -> None:
    sessions = SessionsSection.model_validate({})
    assert sessions.heartbeat_ns == limits.DEFAULT_HEARTBEAT_INTERVAL_MS * 1_000_000
    assert sessions.claim_lease_ns == limits.DEFAULT_CLAIM_LEASE_MS * 1_000_000
    assert sessions.reservation_ttl_ns == limits.DEFAULT_RESERVATION_TTL_MS * 1_000_000
    # By default a daemon limits what one client may hold of a tier; the bare state does not.
    assert sessions.state_config() == StateConfig(
        max_pinned_share=0.75, max_reserved_share=0.5, unwritten_ttl_ns=120_000_000_000
    )


def test_the_state_gets_what_is_configured() -> None:
    given = {"heartbeat": "1s", "max_sessions": 1, "max_claims_per_session": 2}
    given |= {"max_reservations_per_session": 3, "max_waiters": 4, "max_waited_keys": 5}
    given |= {"max_waited_keys_per_session": 6, "unwritten_ttl": "7s"}
    given |= {"max_pinned_share": 0.25, "max_reserved_share": 0.125}
    sessions = SessionsSection.model_validate(given)
    assert sessions.state_config() == StateConfig(
        session_lost_after_ns=2_000_000_000,
        max_sessions=1,
        max_claims_per_session=2,
        max_reservations_per_session=3,
        max_waiters=4,
        max_waited_keys=5,
        max_waited_keys_per_session=6,
        max_pinned_share=0.25,
        max_reserved_share=0.125,
        unwritten_ttl_ns=7_000_000_000,
    )


def test_every_option_says_what_it_means() -> None:
    for section in Config.model_fields.values():
        assert section.description
        assert section.annotation is not None
        for name, option in section.annotation.model_fields.items():
            assert option.description, name


@pytest.mark.parametrize("option", ["directory", "tokens", "address"])
def test_a_name_with_a_nul_in_it_is_refused(option: str) -> None:
    name = {"directory": "/a\0b", "tokens": "a\0b", "address": "unix:/a\0b"}[option]
    section = "disk" if option == "directory" else "server"
    with pytest.raises(ValueError, match=r"NUL|no absolute"):
        Config.model_validate({section: {option: name}})
