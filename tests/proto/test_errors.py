"""The error tree: every error has a code, and arrives as the same class over a real gRPC call."""

import importlib
import pkgutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

import prefixd.proto
from prefixd.proto.errors import (
    BY_NAME,
    ERROR_METADATA,
    RETRY_METADATA,
    TRANSPORT_CODES,
    CallerError,
    ClaimLost,
    Code,
    DaemonUnavailable,
    EntryCorrupt,
    InvalidSize,
    PrefixdError,
    from_grpc,
    metadata_of,
)
from tests.support.event_loop import run

SENTENCE = "the key is 31 bytes, §é: send 32\nand try no more"


def tree(root: type[PrefixdError] = PrefixdError) -> Iterator[type[PrefixdError]]:
    yield root
    for sub in root.__subclasses__():
        yield from tree(sub)


CLASSES = sorted(set(BY_NAME.values()), key=lambda c: c.name)


# ---- the table


def test_every_class_has_its_own_name() -> None:
    for module in pkgutil.iter_modules(prefixd.proto.__path__):
        if module.name != "generate":
            importlib.import_module(f"prefixd.proto.{module.name}")
    classes = [c for c in tree() if c.__module__.startswith("prefixd.")]
    assert all("name" in vars(c) for c in classes)
    assert len({c.name for c in classes}) == len(classes)
    assert set(BY_NAME.values()) == set(classes)
    assert all(BY_NAME[c.name] is c for c in classes)


@pytest.mark.parametrize("error_class", CLASSES, ids=lambda c: c.name)
def test_every_class_says_what_it_is(error_class: type[PrefixdError]) -> None:
    assert error_class.__doc__
    assert error_class.name == error_class.name.lower()
    assert error_class.name.replace("_", "").isalnum()
    assert error_class.code is not Code.OK


@pytest.mark.parametrize("error_class", CLASSES, ids=lambda c: c.name)
def test_repeating_a_wrong_call_never_helps(error_class: type[PrefixdError]) -> None:
    if issubclass(error_class, CallerError):
        assert not error_class.retryable
        assert issubclass(error_class, ValueError)


def test_every_status_code_has_a_meaning() -> None:
    assert {code.name for code in Code} == {code.name for code in grpc.StatusCode}
    assert set(TRANSPORT_CODES) == set(Code)
    assert set(TRANSPORT_CODES.values()) <= set(BY_NAME.values())


def test_of_the_codes_alone_only_these_promise_that_repeating_may_help() -> None:
    assert {code.name for code, meaning in TRANSPORT_CODES.items() if meaning.retryable} == {
        "ABORTED",
        "CANCELLED",
        "DEADLINE_EXCEEDED",
        "UNAVAILABLE",
    }


# ---- over the wire


class Refusing(grpc.GenericRpcHandler):
    """Answers a call of /<status code>/<error name> with that code and name."""

    def service(self, details: Any) -> Any:
        _, code, name = details.method.split("/")

        def handle(_: bytes, context: Any) -> bytes:
            if name in BY_NAME:
                context.set_trailing_metadata(metadata_of(BY_NAME[name](SENTENCE)))
            elif name != "-":
                context.set_trailing_metadata(((ERROR_METADATA, name), (RETRY_METADATA, "1")))
            context.abort(grpc.StatusCode[code], SENTENCE)

        return grpc.unary_unary_rpc_method_handler(handle)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2), handlers=[Refusing()])
    socket: Path = tmp_path_factory.mktemp("e") / "s"
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    yield f"unix:{socket}"
    server.stop(None).wait()


def call(address: str, code: Code, name: str) -> PrefixdError:
    with grpc.insecure_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as failure:
            channel.unary_unary(f"/{code.name}/{name}")(b"", timeout=20)
        return from_grpc(failure.value)


@pytest.mark.parametrize("error_class", CLASSES, ids=lambda c: c.name)
def test_an_error_arrives_as_what_it_was(address: str, error_class: type[PrefixdError]) -> None:
    error = call(address, error_class.code, error_class.name)
    assert type(error) is error_class
    assert str(error) == SENTENCE
    assert error.retryable == error_class.retryable


@pytest.mark.parametrize("code", [c for c in Code if c is not Code.OK], ids=lambda c: c.name)
def test_a_status_that_is_not_ours_is_translated(address: str, code: Code) -> None:
    error = call(address, code, "-")
    assert type(error) is TRANSPORT_CODES[code]
    assert str(error) == SENTENCE


def test_an_error_of_a_later_version_keeps_its_promise(address: str) -> None:
    error = call(address, Code.FAILED_PRECONDITION, "invented_later")
    assert type(error) is PrefixdError
    assert error.retryable
    assert not PrefixdError.retryable


def test_a_message_that_the_transport_finds_too_large(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as failure:
            channel.unary_unary("/OK/-")(bytes(5 << 20), timeout=20)
        error = from_grpc(failure.value)
    assert type(error) is InvalidSize
    assert "larger than max" in str(error)
    assert not error.retryable


def test_nobody_at_the_address(tmp_path: Path) -> None:
    with grpc.insecure_channel(f"unix:{tmp_path}/none") as channel:
        with pytest.raises(grpc.RpcError) as failure:
            channel.unary_unary("/x/y")(b"", timeout=20)
        error = from_grpc(failure.value)
    assert type(error) is DaemonUnavailable
    assert error.retryable


def test_the_asyncio_stack_tells_the_same(address: str) -> None:
    async def calls() -> list[PrefixdError]:
        errors = []
        async with grpc.aio.insecure_channel(address) as channel:
            for error_class in CLASSES:
                method: Any = channel.unary_unary(f"/{error_class.code.name}/{error_class.name}")
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await method(b"", timeout=20)
                errors.append(from_grpc(failure.value))
        return errors

    errors = run(calls())
    assert [type(error) for error in errors] == CLASSES
    assert {str(error) for error in errors} == {SENTENCE}


# ---- the metadata


def test_the_metadata_of_an_error() -> None:
    assert metadata_of(ClaimLost("gone")) == (
        ("prefixd-error", "claim_lost"),
        ("prefixd-retry", "0"),
    )
    assert dict(metadata_of(DaemonUnavailable("away")))[RETRY_METADATA] == "1"


def test_an_error_is_raised_with_a_sentence_and_caught_by_its_family() -> None:
    with pytest.raises(EntryCorrupt, match="offset 7"):
        raise BY_NAME["record_error"]("the payload at offset 7 is damaged")
    with pytest.raises(ValueError, match="31 bytes"):
        raise BY_NAME["invalid_key"]("31 bytes")


@pytest.mark.parametrize(
    ("details", "words"),
    [
        ("{0} timed out before receiving SETTINGS frame", "it does not answer"),
        ("{0} connect: Connection refused (111)", "no process listens there"),
        ("{0} Ssl handshake failed: CERTIFICATE_VERIFY_FAILED", "its certificate is not one"),
        ("what gRPC never said before", "what gRPC never said before"),
    ],
)
def test_a_connection_that_fails_is_told_in_words_for_people(details: str, words: str) -> None:
    class Failed(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

        def details(self) -> str:
            return details.format("failed to connect to all addresses; last error: UNKNOWN:")

        def trailing_metadata(self) -> None:
            return None

    said = from_grpc(Failed())
    assert isinstance(said, DaemonUnavailable)
    assert str(said).startswith(words)
    assert "last error" not in str(said)
