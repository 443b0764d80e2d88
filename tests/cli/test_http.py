"""Answers of untrusted servers: one deadline and one size limit for a whole answer."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path
from threading import Thread

import pytest
from support.certificates import Authority
from support.local_http import Answer, Request, answering, sending

from torchmem.cli.http import MAX_ANSWER_BYTES, HttpAnswer, TooLargeError, fetch
from torchmem.cli.main import main

SECONDS = 0.5
DRIPS = 400
PIECE = b"x" * (1 << 20)


def drip(start: bytes, each: bytes) -> Callable[[], Iterator[bytes]]:
    """Return an answer in very many pieces."""
    return lambda: chain([start], repeat(each, DRIPS))


@pytest.mark.parametrize(
    ("start", "each"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"y"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % DRIPS, b"x"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
    ],
)
def test_an_answer_that_drips_has_a_deadline(start: bytes, each: bytes) -> None:
    """However an answer is divided, it must be whole at the deadline."""
    with sending(drip(start, each), pause=SECONDS / 10) as url, pytest.raises(TimeoutError):
        fetch(url, timeout_seconds=SECONDS)


def test_the_deadline_holds_for_a_tls_handshake() -> None:
    """A server that sends the records of its handshake byte by byte is given up."""
    record = b"\x16\x03\x03\x40\x00" + b"\x02\x00\x3f\xfc"
    with sending(drip(record, b"\x00"), pause=SECONDS / 10) as url, pytest.raises(TimeoutError):
        fetch(url.replace("http:", "https:"), timeout_seconds=SECONDS)


def test_the_deadline_holds_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that drips over TLS is given up as well, and a whole one is read."""
    authority = Authority(tmp_path)
    pair = authority.issue("server", "localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n"

    def serve(listener: socket.socket, pause: float) -> None:
        with suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True) as end:
            end.recv(1 << 16)
            for piece in (head, b"a", b"b", b"c"):
                time.sleep(pause)
                end.sendall(piece)

    def ask(pause: float) -> HttpAnswer:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            Thread(target=serve, args=(listener, pause), daemon=True).start()
            url = f"https://localhost:{listener.getsockname()[1]}"
            return fetch(url, timeout_seconds=60.0 if not pause else SECONDS)

    assert ask(0.0).body == b"abc"
    with pytest.raises(TimeoutError):
        ask(SECONDS * 0.4)


def test_the_deadline_holds_for_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that does not respond is given up."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(60))

    with pytest.raises(TimeoutError):
        fetch("http://name.invalid", timeout_seconds=SECONDS)


@pytest.mark.parametrize(
    ("start", "each"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", PIECE),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + PIECE + b"\r\n"),
        (b"HTTP/1.1 500 No\r\nContent-Length: %d\r\n\r\n" % (1 << 40), PIECE),
    ],
)
def test_an_answer_has_one_size(start: bytes, each: bytes) -> None:
    """A larger answer is refused, whatever it says about its length, and not cut off."""
    with (
        sending(lambda: chain([start], repeat(each))) as url,
        pytest.raises(TooLargeError) as error,
    ):
        fetch(url, timeout_seconds=60.0)

    assert str(error.value) == f"its answer has more than {MAX_ANSWER_BYTES >> 20} MiB"


def test_an_answer_of_the_whole_size() -> None:
    """The limit itself is allowed."""
    with answering(lambda _: Answer(body=bytes(MAX_ANSWER_BYTES))) as address:
        assert len(fetch(f"http://{address}", timeout_seconds=60.0).body) == MAX_ANSWER_BYTES


def redirected(location: str) -> Callable[[Request], Answer]:
    """Return a server that redirects all paths but /end."""

    def answer(request: Request) -> Answer:
        if request.path == "/end":
            return Answer(body=str(request.headers["Authorization"]).encode())
        return Answer(302, headers={"Location": location})

    return answer


def test_a_redirect_on_the_same_server_is_followed() -> None:
    """It gets the credentials again, because it is the server that had them."""
    with answering(redirected("/end")) as address:
        assert fetch(f"http://user:secret@{address}/a").body == b"Basic dXNlcjpzZWNyZXQ="


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("http://localhost:1/x", "redirects to http://localhost:1/x"),
        ("//user:secret@elsewhere/x", "redirects to http://elsewhere/x"),
        ("https://127.0.0.1/x", "redirects to https://127.0.0.1/x"),
        ("file:///etc/passwd", "redirects to file:///etc/passwd"),
        ("/a", "it redirects again and again"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [["fleet", "--prometheus"], ["doctor", "--exporter"], ["top", "--once", "--exporter"]],
)
def test_other_redirects_are_refused(
    command: list[str], location: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A redirect to another host, port or scheme is not followed; a sentence names it."""
    with answering(redirected(location)) as address:
        main([*command, f"http://user:secret@{address}"])

    shown = " ".join("".join(capsys.readouterr()).split())
    assert reason in shown
    assert "secret" not in shown
