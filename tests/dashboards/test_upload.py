"""`torchmem manifests dashboards`: write the dashboards, or save them in a Grafana."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.hostile_answers import DEEP, variants
from support.local_http import Answer, Request, answering

from torchmem.cli.main import main

TOKEN = "glsa_test"  # noqa: S105 - a fake
BOARDS = ("fleet", "node", "oom", "self", "training-memory")


def _json(status: int, body: object) -> Answer:
    return Answer(status, json.dumps(body).encode(), "application/json")


@dataclass
class FakeGrafana:
    """The part of Grafana's HTTP API that its documentation describes, in memory.

    https://grafana.com/docs/grafana/latest/developers/http_api/
    """

    url: str = ""
    folders: dict[str, str] = field(default_factory=dict)
    boards: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    hidden_folders: bool = False

    def answer(self, request: Request) -> Answer:
        """Answer as Grafana does."""
        self.requests.append(request)
        if request.headers["Authorization"] != f"Bearer {TOKEN}":
            return _json(401, {"message": "Invalid API key"})
        path = request.path.partition("?")[0]
        if path.startswith("/api/dashboards/uid/"):
            return self._board(path.rpartition("/")[2])
        routes: dict[str, Callable[[Request], Answer]] = {
            "/api/folders": self._folders,
            "/api/dashboards/db": self._save,
            "/api/datasources": self._datasources,
        }
        found = routes.get(path)
        return found(request) if found else _json(404, {"message": "Not found"})

    def _board(self, uid: str) -> Answer:
        if uid not in self.boards:
            return _json(404, {"message": "Dashboard not found"})
        return _json(200, {"dashboard": self.boards[uid]["dashboard"], "meta": {}})

    def _folders(self, request: Request) -> Answer:
        if not request.body:
            shown = {} if self.hidden_folders else self.folders
            return _json(200, [{"uid": uid, "title": title} for title, uid in shown.items()])
        title = json.loads(request.body)["title"]
        if title in self.folders:
            return _json(409, {"message": "a folder with the same name already exists"})
        self.folders[title] = f"uid-of-{title}"
        return _json(200, {"id": 1, "uid": self.folders[title], "title": title})

    def _save(self, request: Request) -> Answer:
        body = json.loads(request.body)
        uid = body["dashboard"]["uid"]
        if uid in self.boards and not body["overwrite"]:
            message = "The dashboard has been changed by someone else"
            return _json(412, {"message": message, "status": "version-mismatch"})
        self.boards[uid] = body
        return _json(200, {"uid": uid, "url": f"/d/{uid}/title", "status": "success"})

    def _datasources(self, _: Request) -> Answer:
        return _json(
            200,
            [
                {"uid": "p1", "name": "Mimir", "type": "prometheus"},
                {"uid": "l1", "name": "Logs", "type": "loki"},
            ],
        )


@pytest.fixture
def grafana(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGrafana]:
    """Run a Grafana whose token is in the environment."""
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    fake = FakeGrafana()
    with answering(fake.answer) as address:
        fake.url = f"http://{address}"
        yield fake


def upload(url: str, *arguments: str) -> int:
    """Run `torchmem manifests dashboards --grafana`."""
    return main(["manifests", "dashboards", "--grafana", url, *arguments])


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return the sentence with which `torchmem manifests dashboards --grafana` refuses."""

    def run(url: str, *arguments: str, code: int = 2) -> str:
        assert upload(url, *arguments) == code
        shown = capsys.readouterr()
        assert (shown.out, shown.err.count("\n")) == ("", 1)
        return shown.err

    return run


def shipped(root: Path) -> dict[str, dict[str, Any]]:
    """Return the shipped dashboards by UID."""
    folder = root / "dashboards" / "json"
    boards = [json.loads((folder / f"{name}.json").read_text()) for name in BOARDS]
    return {board["uid"]: board for board in boards}


def test_every_dashboard_is_saved_in_a_folder(
    grafana: FakeGrafana, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All dashboards are in a new folder `torchmem`, unchanged, and their addresses are printed."""
    assert upload(f"{grafana.url}/") == 0

    assert {uid: body["dashboard"] for uid, body in grafana.boards.items()} == shipped(root)
    assert {body["folderUid"] for body in grafana.boards.values()} == {"uid-of-torchmem"}
    assert capsys.readouterr().out.splitlines() == [
        f"{grafana.url}/d/{uid}/title" for uid in grafana.boards
    ]


def test_an_existing_folder_is_used(grafana: FakeGrafana) -> None:
    """A folder with the title is used, and no second one is made."""
    grafana.folders = {"Other": "o", "GPUs": "g"}

    assert upload(grafana.url, "--folder", "GPUs") == 0
    assert {body["folderUid"] for body in grafana.boards.values()} == {"g"}
    assert grafana.folders == {"Other": "o", "GPUs": "g"}


def test_existing_dashboards_are_replaced_only_with_force(
    grafana: FakeGrafana, refused: Callable[..., str]
) -> None:
    """If one exists, nothing is changed and the sentence names it; --force replaces all."""
    changed = {"dashboard": {"title": "mine"}}
    grafana.boards["torchmem-oom"] = changed

    assert refused(grafana.url) == (
        f"torchmem: {grafana.url} already has the dashboards After an OOM: add --force to replace "
        "them.\n"
    )
    assert (grafana.boards, grafana.folders) == ({"torchmem-oom": changed}, {})
    assert upload(grafana.url, "--force") == 0
    assert grafana.boards["torchmem-oom"]["dashboard"]["title"] == "After an OOM"
    assert upload(grafana.url, "--force") == 0


@pytest.mark.parametrize("name", ["Mimir", "p1"])
def test_a_data_source_is_chosen_by_name_or_uid(grafana: FakeGrafana, name: str) -> None:
    """Each dashboard starts with the data source that was given."""
    assert upload(grafana.url, "--datasource", name) == 0

    for body in grafana.boards.values():
        (variable,) = [
            each for each in body["dashboard"]["templating"]["list"] if each["name"] == "datasource"
        ]
        assert variable["current"] == {"text": "Mimir", "value": "p1"}


@pytest.mark.parametrize("name", ["Logs", "Nothing"])
def test_an_unknown_data_source_is_refused(
    name: str, grafana: FakeGrafana, refused: Callable[..., str]
) -> None:
    """A data source that is missing or not Prometheus is refused with the names that work."""
    assert refused(grafana.url, "--datasource", name) == (
        f"torchmem: {grafana.url} has no Prometheus data source {name!r}: give one of these with "
        "--datasource: Mimir.\n"
    )
    assert grafana.boards == {}


def test_the_token_can_come_from_a_file(
    grafana: FakeGrafana, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--token-file is read instead of the environment."""
    monkeypatch.setenv("GRAFANA_TOKEN", "another")
    (tmp_path / "token").write_text(f"{TOKEN}\n")

    assert upload(grafana.url, "--token-file", str(tmp_path / "token")) == 0


def test_a_wrong_token_is_named(
    grafana: FakeGrafana, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """401 is explained with what Grafana said, and without the token."""
    monkeypatch.setenv("GRAFANA_TOKEN", "secret")
    error = refused(grafana.url, code=1)

    assert "does not accept the token" in error
    assert "401 and 'Invalid API key'" in error
    assert "secret" not in error


def test_an_invisible_folder_is_explained(
    grafana: FakeGrafana, refused: Callable[..., str]
) -> None:
    """409 for a folder that the token cannot list says which permission is missing."""
    grafana.folders, grafana.hidden_folders = {"torchmem": "t"}, True

    assert "folders:read" in refused(grafana.url)
    assert grafana.boards == {}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (_json(403, {"message": "Permissions needed"}), "the role Editor, or the permission"),
        (Answer(404, b"<html>"), "has no such page: give the URL of its start page"),
        (Answer(302), "redirects to another address"),
        (Answer(500, b"oops"), "refuses the request"),
        (Answer(200, b"<html>login"), "does not answer as Grafana does"),
        (_json(200, {"message": "Welcome"}), "does not answer as Grafana does"),
        (Answer(200, DEEP), "does not answer as Grafana does"),
        (Answer(200, b"[" + b"1" * 400 + b"]"), "does not answer as Grafana does"),
        (Answer(500, DEEP), "refuses the request"),
        (_json(500, {"message": "\x1b[2J"}), "'\N{REPLACEMENT CHARACTER}[2J'"),
    ],
    ids=["403", "404", "302", "500", "login", "another", "deep", "number", "deep 500", "control"],
)
def test_an_answer_that_is_no_help_is_explained(
    answer: Answer, said: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other answer is explained in one sentence, and the exit code is 1."""
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    with answering(lambda _: answer) as address:
        assert said in refused(f"http://{address}", code=1)


@pytest.mark.parametrize("path", ["/api/datasources", "/api/folders", "/api/dashboards/db"])
def test_a_hostile_grafana_gives_one_sentence(
    path: str, grafana: FakeGrafana, capsys: pytest.CaptureFixture[str]
) -> None:
    """No value in Grafana's answers ends the command with a traceback or controls the terminal."""
    grafana.folders = {"torchmem": "t"}
    valid = {
        "/api/datasources": [{"uid": "p", "name": "Prometheus", "type": "prometheus"}],
        "/api/folders": [{"uid": "t", "title": "torchmem"}],
        "/api/dashboards/db": {"uid": "a", "url": "/d/a/title"},
    }[path]
    bodies = [*variants(json.dumps(valid).encode()), b'{"url": "http://["}', DEEP]
    current: list[bytes] = []

    def answer(asked: Request) -> Answer:
        return Answer(body=current[-1]) if asked.path.startswith(path) else grafana.answer(asked)

    with answering(answer) as address:
        for body in bodies:
            current.append(body)
            code = upload(f"http://{address}", "--datasource", "Prometheus", "--force")
            shown = "".join(capsys.readouterr())
            assert code in {0, 1, 2}
            assert all(map(str.isprintable, shown.splitlines())), shown


def test_folders_without_end(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose list of folders never ends is refused."""
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    folders = _json(200, [{"uid": "a", "title": "a"}] * 1000)
    other = _json(404, {"message": "Dashboard not found"})
    with answering(lambda asked: folders if "folders" in asked.path else other) as address:
        assert "does not answer as Grafana does" in refused(f"http://{address}", code=1)


def test_an_unreachable_grafana_is_explained(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an answer, the sentence has the reason."""
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    with answering(lambda _: Answer()) as address:
        pass

    assert "Connection refused" in refused(f"http://{address}", code=1)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("grafana.example.org", "starts with http:// or https://"),
        ("http://admin:secret@127.0.0.1:1", "takes no password"),
        ("http://127.0.0.1:1", "there is no token"),
    ],
)
def test_a_wrong_call_is_refused(
    url: str, said: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a URL or token that can work, nothing is sent, and no password is repeated."""
    monkeypatch.delenv("GRAFANA_TOKEN", raising=False)
    error = refused(url)

    assert said in error
    assert "secret" not in error


def test_a_file_that_was_changed_is_kept(tmp_path: Path, root: Path) -> None:
    """--out refuses to replace a changed file, and writes nothing; with --force it does."""
    changed = tmp_path / "fleet.json"
    assert main(["manifests", "dashboards", "--out", str(tmp_path)]) == 0
    assert main(["manifests", "dashboards", "--out", str(tmp_path)]) == 0
    changed.write_text("{}")
    (tmp_path / "node.json").unlink()

    assert main(["manifests", "dashboards", "--out", str(tmp_path)]) == 2
    assert (changed.read_text(), (tmp_path / "node.json").exists()) == ("{}", False)
    assert main(["manifests", "dashboards", "--out", str(tmp_path), "--force"]) == 0
    assert changed.read_bytes() == (root / "dashboards" / "json" / "fleet.json").read_bytes()
