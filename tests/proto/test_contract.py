"""The contract keeps its own conventions: errors in comments, units in names, a result per key."""

import re
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, MethodDescriptor

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import BY_NAME

TEXT = (Path(__file__).resolve().parents[2] / "proto" / "prefixd.proto").read_text()
FILE = pb.DESCRIPTOR
METHODS = [m for s in FILE.services_by_name.values() for m in s.methods]
MESSAGES = list(FILE.message_types_by_name.values())
NUMBERS = {
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_INT32,
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_FIXED32,
    FieldDescriptor.TYPE_FIXED64,
}

UNITS = ("_bytes", "_ms", "_ns", "_tokens", "_permille")
#: Numbers without a unit: they count things, identify them, or are positions in a list.
COUNTS = {
    "pulled",
    "all_saved",
    "token_count",
    "token_counts",
    "layer_count",
    "layer_counts",
    "max_batch_keys",
    "page_entries",
    "page_claims",
    "page_reservations",
    "entries",
    "pinned_entries",
    "max_entries",
    "recovered_entries",
    "dropped_at_start",
    "hits",
    "saves",
    "evictions",
    "corrupt",
    "sessions",
    "claims",
    "reservations",
    "waiters",
    "pins",
    "expired_claims",
    "expired_reservations",
    "orphan_records",
    "orphan_index_rows",
    "sampled_keys",
    "lookups",
    "hit_entries",
    "parts_copied",
    "problem_count",
    "data_port",
    "items",
    "damaged_entries",
    "unreadable_entries",
    "passes",
    "calls",
    "times",
    "remembered_events",
    "unknown_entries",
    "pieces",
    "requests",
    "unanswered",
    "refused",
    "restores",
    "restore_times",
    "dropped",
    "unnamed",
    "recording",
    "hit_blocks",
}
NAMES = {
    "token_address",
    "addresses",
    "session_id",
    "claim_id",
    "claim_ids",
    "ids",
    "token",
    "tokens",  # of reservations
    "generation",
    "generations",
    "sequence",
    "pid",
    "payload_crc32c",
    "index",
    "range",
    "item",
    "cursor",
    "next_cursor",
    "page_claims",
    "page_reservations",
    "problem_count",
    "data_port",
    "items",
}
PAIRS = {"extents"}  # offset, length; the comment says so


def comment_of(method: MethodDescriptor) -> str:
    """The comment lines directly above an rpc, joined."""
    service = TEXT[TEXT.index(f"service {method.containing_service.name} {{") :]
    match = re.search(rf"((?:^ *//.*\n)*)^ *rpc {method.name}\(", service, re.MULTILINE)
    assert match is not None
    return " ".join(line.strip(" /") for line in match[1].splitlines())


def can_be_wrong(message: Descriptor) -> bool:
    """Whether a request has a field that a caller can get wrong."""
    return any(field.type != FieldDescriptor.TYPE_BOOL for field in message.fields)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_every_rpc_says_what_it_does_and_how_it_fails(method: MethodDescriptor) -> None:
    comment = comment_of(method)
    assert len(comment.split()) >= 5
    assert ("Errors: " in comment) == can_be_wrong(method.input_type)
    named = set(re.findall(r"\b[A-Z]{2,}(?:_[A-Z]+)+\b", comment))
    raised = {error_class.code.name for error_class in BY_NAME.values()}
    assert named <= raised & {code.name for code in grpc.StatusCode}


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_every_rpc_has_its_own_request_and_response(method: MethodDescriptor) -> None:
    assert method.input_type.name == f"{method.name}Request"
    # A session sends events, not responses.
    sent = "SessionEvent" if method.name == "Session" else f"{method.name}Response"
    assert method.output_type.name == sent


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.name)
def test_every_number_has_its_unit_in_its_name(message: Descriptor) -> None:
    for field in message.fields:
        if field.type in NUMBERS:
            known = field.name in COUNTS | NAMES | PAIRS
            assert field.name.endswith(UNITS) != known, f"{message.name}.{field.name}"
        if field.name.endswith("_ns"):
            assert field.type in NUMBERS, f"{message.name}.{field.name}"


def test_the_lists_above_name_only_what_exists() -> None:
    existing = {field.name for message in MESSAGES for field in message.fields}
    assert existing >= COUNTS | NAMES | PAIRS


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.name)
def test_no_field_is_of_a_type_that_the_contract_does_without(message: Descriptor) -> None:
    # Floats lose counts above 2^53, and a required or grouped field can never be dropped.
    refused = {
        FieldDescriptor.TYPE_FLOAT,
        FieldDescriptor.TYPE_DOUBLE,
        FieldDescriptor.TYPE_GROUP,
    }
    assert not [field.name for field in message.fields if field.type in refused]


@pytest.mark.parametrize(
    ("request_name", "batch", "results"),
    [
        ("Lookup", "keys", "results"),
        ("Claim", "keys", "results"),
        ("Release", "claim_ids", "results"),
        ("Cancel", "tokens", "cancelled"),
    ],
)
def test_a_batch_is_answered_by_a_list(request_name: str, batch: str, results: str) -> None:
    request = FILE.message_types_by_name[f"{request_name}Request"].fields_by_name[batch]
    response = FILE.message_types_by_name[f"{request_name}Response"].fields_by_name[results]
    assert request.is_repeated
    assert response.is_repeated


def test_whoever_changes_state_says_whose_call_it_is() -> None:
    for name in ("Claim", "Release", "Cancel", "Read", "HandOver"):
        fields = FILE.message_types_by_name[f"{name}Request"].fields_by_name
        assert fields["session"].number == 1
        assert fields["session"].message_type.name == "SessionRef"
    for name in ("Save", "SaveStaged", "Reserve"):
        header = FILE.message_types_by_name[f"{name}Request"].fields_by_name["header"]
        assert header.message_type.fields_by_name["session"].message_type.name == "SessionRef"


def test_framed_calls_are_answered_in_kind() -> None:
    """And messages with the name of an rpc are those of gRPC. Reads are answered by parts, and
    saves have messages of their own, because their payloads are outside."""
    asked = FILE.message_types_by_name["FramedRequest"].oneofs_by_name["kind"].fields
    asked = {field.name: field for field in asked}
    answered = FILE.message_types_by_name["FramedResponse"].fields_by_name
    unanswered, by_parts = {"give_back", "attach"}, {"read", "fetch"}
    assert set(asked) - set(answered) == unanswered | by_parts
    assert set(answered) - set(asked) == {"failure", "part", "read_end", "save_ready"}
    rpcs = {method.name: method for method in METHODS}
    for name in set(asked) - unanswered - by_parts - {"save"}:
        kind = "".join(word.capitalize() for word in name.split("_"))
        messages = asked[name].message_type.name, answered[name].message_type.name
        assert messages == (f"{kind}Request", f"{kind}Response")
        assert asked[name].number == answered[name].number
        if kind in rpcs:
            assert rpcs[kind].input_type is asked[name].message_type


@pytest.mark.parametrize("enum", list(FILE.enum_types_by_name.values()), ids=lambda e: e.name)
def test_enumerations_carry_their_name_and_begin_with_nothing(enum: EnumDescriptor) -> None:
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
    assert all(value.name.startswith(prefix) for value in enum.values)
    # From 100 on: what only clients say.
    numbers = [value.number for value in enum.values if value.number < 100]
    assert numbers == list(range(len(numbers)))
    # A field that was not set is zero: that is a named default, or unspecified.
    first = enum.values[0].name.removeprefix(prefix)
    assert first == {"ReadStatus": "OK"}.get(enum.name, "UNSPECIFIED")
