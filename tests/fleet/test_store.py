"""Queries are bounded and authorized, and every failure is one sentence."""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path

import pytest
from support.hostile_answers import DEEP
from support.local_http import Answer, Request, answering, sending

from torchmem.cli.main import main
from torchmem.fleet.store import MAX_WINDOW_SECONDS, Store, Window

HOUR = 3600
NOTHING = json.dumps({"status": "success", "data": {"resultType": "vector", "result": []}})
SUM = "sum_over_time(x[{}s])"


def query(request: Request) -> str:
    """Return the expression of a request."""
    return urllib.parse.parse_qs(urllib.parse.urlsplit(request.path).query)["query"][0]


def one(value: str) -> bytes:
    """Return an answer with one series."""
    row = {"metric": {"run": "gpt"}, "value": [0, value]}
    return json.dumps({"data": {"result": [row]}}).encode()


def limited(most_seconds: int, status: int) -> Callable[[Request], Answer]:
    """Return a store that answers with the length of a query, up to a limit."""

    def answer(request: Request) -> Answer:
        found = re.search(r"\[(\d+)s", query(request))
        assert found
        if int(found[1]) > most_seconds:
            return Answer(status, b'{"error": "too many samples"}')
        return Answer(body=one(found[1]))

    return answer


@pytest.mark.parametrize("status", [422, 429, 503, 504])
def test_a_query_that_is_too_much_is_asked_in_parts(status: int) -> None:
    """A store that answers for six hours at most is asked for each six hours of two days, once."""
    with answering(limited(6 * HOUR, status)) as address:
        store = Store(f"http://{address}")
        past = Window(0, 2 * MAX_WINDOW_SECONDS)
        answers = list(store.over(past, SUM.format))

        assert [(window.start, window.end) for window, _ in answers] == [
            (start, start + 6 * HOUR) for start in range(0, 2 * MAX_WINDOW_SECONDS, 6 * HOUR)
        ]
        assert {value for _, ((_, value),) in answers} == {6.0 * HOUR}
        assert store.window_seconds == 6 * HOUR


@pytest.mark.parametrize("value", ["NaN", "+Inf", "12"])
def test_only_finite_values_count(value: str) -> None:
    """A value that is not a finite number is absent."""
    with answering(lambda _: Answer(body=one(value))) as address:
        rows = Store(f"http://{address}").query("x", 0)

    assert [number for _, number in rows] == ([12.0] if value == "12" else [])


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (Answer(401, b""), "does not accept the credentials: give --token-file or --header"),
        (Answer(403, b""), "does not allow queries with these credentials"),
        (Answer(404, b""), "has no query API at this path"),
        (Answer(400, b'{"error": "parse error"}'), "(it answered 400 and 'parse error')"),
        (Answer(422, b'{"error": "too many"}'), "minutes (too many): raise its"),
        (Answer(200, b"<html>"), "does not answer as Prometheus does"),
        (Answer(200, b'{"data": {"result": [[]]}}'), "does not answer as Prometheus does"),
        (Answer(200, DEEP), "does not answer as Prometheus does"),
        (
            Answer(200, b'{"data": {"result": [{"metric": {}, "value": [0]}]}}'),
            "as Prometheus does",
        ),
        (
            Answer(200, b'{"data": {"result": [{"metric": {}, "value": [0, %s]}]}}' % (b"1" * 400)),
            "does not answer as Prometheus does",
        ),
        (Answer(200, NOTHING.encode().replace(b"[]", b"1")), "does not answer as Prometheus does"),
        (Answer(500, DEEP), "refuses the query"),
        (Answer(422, DEEP), "minutes (it answered 422): raise its"),
        (Answer(200, NOTHING.encode()), "has no series of torchmem in the last 30d"),
    ],
)
def test_a_refusal_is_one_sentence(
    answer: Answer, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the store answers, the command prints one sentence and exits with 2."""
    with answering(lambda _: answer) as address:
        assert main(["fleet", "--prometheus", f"http://user:secret@{address}"]) == 2

    error = capsys.readouterr().err
    assert sentence in error
    assert error.startswith("torchmem: ")
    assert error.endswith(".\n")
    assert error.count("\n") == 1
    assert "secret" not in error


@pytest.mark.parametrize("value", ["1e300", "-1e300", "1e18", "-5", "0"])
@pytest.mark.parametrize("label", ["oom", "\x1b[2J"])
def test_impossible_values_have_a_report_or_a_sentence(
    value: str, label: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No number that a store can give as a time, a size or hours ends the command otherwise."""
    names = ("run", "gpu", "uuid", "instance", "rank", "pid", "state", "cause", "job")
    row = {"metric": dict.fromkeys(names, label), "value": [0, value]}
    body = json.dumps({"data": {"result": [row]}}).encode()
    with answering(lambda _: Answer(body=body)) as address:
        codes = [
            main(["fleet", "--prometheus", f"http://{address}", "--since", "2d", *flags])
            for flags in ((), ("--json",))
        ]

    assert set(codes) <= {0, 2}
    assert all(map(str.isprintable, "".join(capsys.readouterr()).splitlines()))


def test_a_store_that_drips(capsys: pytest.CaptureFixture[str]) -> None:
    """--timeout holds for a whole answer, not for each read of it."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\n"
    with sending(lambda: chain([head], repeat(b" ", 400)), pause=0.05) as url:
        assert main(["fleet", "--prometheus", url, "--timeout", "0.3"]) == 2

    assert "(no answer within 0.3 s): raise its limits, or --timeout." in capsys.readouterr().err


def test_a_store_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """A refused connection is named, with the flag to check."""
    assert main(["fleet", "--prometheus", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == (
        "torchmem: cannot reach http://127.0.0.1:1 (Connection refused): check --prometheus.\n"
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--since", "soon"], "--since soon is not a time of at most 400 days"),
        (["--since", "0d"], "--since 0d is not a time"),
        (["--until", "Monday"], "--until Monday is not a time: write one such as"),
        (["--timeout", "nan"], "--timeout must be more than 0"),
        (["--rows", "0"], "--rows must be at least 1"),
        (["--header", "secret"], "--header needs a name, a colon"),
        (["--header", "A:b\nc"], "--header needs a name, a colon"),
        (["--token-file", "/nonexistent"], "cannot read the token from /nonexistent"),
        (["--html", "fleet.txt"], "--html writes a page"),
    ],
)
def test_a_wrong_flag_is_one_sentence(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag that cannot be used is named before the store is asked."""
    assert main(["fleet", "--prometheus", "http://127.0.0.1:1", *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_credentials_and_headers_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every request has the token of the file, else of the variable, and the given headers."""
    seen = set()

    def answer(request: Request) -> Answer:
        seen.add((request.headers["Authorization"], request.headers["X-Scope-OrgID"]))
        return Answer(body=NOTHING.encode())

    (tmp_path / "token").write_text("abc\n")
    monkeypatch.setenv("PROMETHEUS_TOKEN", "def")
    with answering(answer) as address:
        command = ["fleet", "--prometheus", address, "--header", "X-Scope-OrgID: ml"]
        main([*command, "--token-file", str(tmp_path / "token")])
        main(command)

    assert seen == {("Bearer abc", "ml"), ("Bearer def", "ml")}
    assert "abc" not in capsys.readouterr().err
