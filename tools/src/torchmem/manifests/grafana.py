"""Dashboards in a Grafana, by its HTTP API.

https://grafana.com/docs/grafana/latest/developers/http_api/ (folder, dashboard, data_source)
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from torchmem.cli import http
from torchmem.sample.errors import TorchmemError, UsageError
from torchmem.sample.untrusted import printable, sanitize_text, strict_json

MAX_FOLDERS = 1000
# The variable of every dashboard with the data source of its panels.
VARIABLE = "datasource"
_PROBLEMS: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "does not accept the token: make one under Administration, Service "
    "accounts",
    HTTPStatus.FORBIDDEN: "does not allow it: give the token's service account the role Editor, or "
    "the permission {permission}",
    HTTPStatus.NOT_FOUND: "has no such page: give the URL of its start page, with its path if it "
    "is not at the top",
}


@dataclass(frozen=True, slots=True)
class Grafana:
    """A Grafana at a URL, and the token of a service account."""

    url: str
    token: str

    def upload(
        self, boards: list[dict[str, Any]], folder: str, datasource: str | None, *, force: bool
    ) -> list[str]:
        """Save dashboards in a folder, which is made if it is missing; return their URLs.

        `datasource` is the name or UID of a Prometheus data source; None leaves the choice to
        Grafana. Raises UsageError, and changes nothing, if one exists and `force` is not set, and
        TorchmemError if Grafana refuses.
        """
        try:
            source = self._datasource(datasource) if datasource else None
            if not force:
                self._refuse_existing(boards)
            uid = self._folder(folder)
            return [self._save(_with_source(board, source), uid, force=force) for board in boards]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._not_grafana() from error

    def _datasource(self, name: str) -> dict[str, str]:
        """Return the data source as the value of a dashboard's variable."""
        answer = self._call("/api/datasources", "datasources:read")
        found = [each for each in answer if each.get("type") == "prometheus"]
        for each in found:
            if name in {each.get("uid"), each.get("name")}:
                return {"text": each["name"], "value": each["uid"]}
        names = ", ".join(sorted(sanitize_text(str(each.get("name"))) for each in found)) or "none"
        raise UsageError(
            f"{self.url} has no Prometheus data source {name!r}: give one of these with "
            f"--datasource: {names}."
        )

    def _refuse_existing(self, boards: list[dict[str, Any]]) -> None:
        existing = [board["title"] for board in boards if self._has(board["uid"])]
        if existing:
            raise self._existing(existing)

    def _has(self, uid: str) -> bool:
        path = f"/api/dashboards/uid/{uid}"
        found = self._call(path, "dashboards:read", accepted=(HTTPStatus.NOT_FOUND,))
        return found is not None and bool(found["dashboard"])

    def _existing(self, titles: list[str]) -> UsageError:
        return UsageError(
            f"{self.url} already has the dashboards {', '.join(titles)}: add --force to replace "
            "them."
        )

    def _folder(self, title: str) -> str:
        """Return the UID of a folder at the top."""
        for folder in self._call(f"/api/folders?limit={MAX_FOLDERS}", "folders:read"):
            if folder.get("title") == title:
                return str(folder["uid"])
        made = self._call(
            "/api/folders", "folders:create", {"title": title}, accepted=(HTTPStatus.CONFLICT,)
        )
        if made is None:
            raise UsageError(
                f"{self.url} has a folder {title!r} that the token may not see: give it the "
                "permission folders:read, or give another --folder."
            )
        return str(made["uid"])

    def _save(self, board: dict[str, Any], folder: str, *, force: bool) -> str:
        """Save a dashboard and return its URL."""
        saved = self._call(
            "/api/dashboards/db",
            "dashboards:write",
            {"dashboard": board, "folderUid": folder, "overwrite": force, "message": "torchmem"},
            accepted=(HTTPStatus.PRECONDITION_FAILED,),
        )
        if saved is None:
            raise self._existing([board["title"]])
        return printable(urllib.parse.urljoin(f"{self.url}/", str(saved["url"])))

    def _call(
        self, path: str, permission: str, body: object = None, accepted: tuple[int, ...] = ()
    ) -> Any:
        """Return what Grafana answers, or None for a status in `accepted`.

        Raises TorchmemError for every other status, with Grafana's message.
        """
        try:
            answer = http.call(f"{self.url}{path}", self.token, body)
        except (OSError, ValueError) as error:
            raise TorchmemError(
                f"cannot reach {self.url} ({http.why_not(error)}): "
                "check the URL, and that Grafana runs."
            ) from error
        # A 404 without a message is not from Grafana's API but from another server at this URL.
        if answer.status in accepted and http.message(answer, "message") is not None:
            return None
        if answer.status != HTTPStatus.OK:
            raise self._problem(answer, permission)
        try:
            return strict_json(answer.body)
        except ValueError as error:
            raise self._not_grafana() from error

    def _not_grafana(self) -> TorchmemError:
        return TorchmemError(
            f"{self.url} does not answer as Grafana does: give the URL of Grafana itself, behind "
            "any login page."
        )

    def _problem(self, answer: http.HttpAnswer, permission: str) -> TorchmemError:
        known = _PROBLEMS.get(answer.status, "refuses the request: see its log")
        if answer.status // 100 == HTTPStatus.MULTIPLE_CHOICES // 100:
            known = "redirects to another address: give that one"
        message = http.message(answer, "message")
        said = f" and {message!r}" if message else ""
        return TorchmemError(
            f"{self.url} {known.format(permission=permission)} (it answered {answer.status}{said})."
        )


def _with_source(board: dict[str, Any], source: dict[str, str] | None) -> dict[str, Any]:
    """Return a dashboard that starts with a data source."""
    if source is None:
        return board
    variables = [
        variable | {"current": source} if variable["name"] == VARIABLE else variable
        for variable in board["templating"]["list"]
    ]
    return board | {"templating": {"list": variables}}
