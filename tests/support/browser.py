"""A page in a real Chromium, driven through tests/grafana/drive.mjs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import needs

PACKAGES = Path(__file__).resolve().parents[1] / "grafana"


def missing() -> str | None:
    """Return why pages cannot be opened here, None if they can."""
    if reason := needs.missing("node", "chromium"):
        return reason
    if not (PACKAGES / "node_modules" / "axe-core").exists():
        return "playwright-core and axe-core are missing: npm ci --prefix tests/grafana"
    return None


class Page:
    """One page of one browser. Every method raises AssertionError if the browser refuses."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def is_ancestor_of(self, pid: int) -> bool:
        """Return whether a process is one of this browser's. Raises OSError if it has ended."""
        while pid > 1:
            if pid == self._process.pid:
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return False

    def goto(self, url: str) -> None:
        """Open a URL."""
        self._do("goto", url=url)

    def reload(self) -> None:
        """Load the page again."""
        self._do("reload")

    def evaluate(self, code: str) -> Any:
        """Return the value of a JavaScript expression."""
        return self._do("evaluate", code=code)

    def wait(self, code: str) -> Any:
        """Wait until a JavaScript expression is true, at most a minute; return its value."""
        return self._do("wait", code=code)

    def click(self, selector: str) -> None:
        """Click the first element that matches, in playwright's language of selectors."""
        self._do("click", selector=selector)

    def hover(self, selector: str) -> None:
        """Move the pointer over the first element that matches."""
        self._do("hover", selector=selector)

    def choose(self, selector: str, *paths: Path) -> None:
        """Choose files in an input element."""
        self._do("choose", selector=selector, paths=[str(path) for path in paths])

    def wheel(self, selector: str, x: int, y: int, delta: int) -> None:
        """Turn the wheel over a point of an element, in CSS pixels; down if delta is positive."""
        self._do("wheel", selector=selector, x=x, y=y, delta=delta)

    def drag(self, selector: str, start: tuple[int, int], end: tuple[int, int]) -> None:
        """Drag from one point of an element to another."""
        self._do("drag", selector=selector, **{"from": start, "to": end})

    def press(self, key: str) -> None:
        """Press a key, such as Tab."""
        self._do("press", key=key)

    def resize(self, width: int, height: int = 1000) -> None:
        """Set the size of the window in CSS pixels."""
        self._do("resize", width=width, height=height)

    def media(self, colors: str = "light", motion: str = "no-preference") -> None:
        """Set the preferred colors (dark, light) and motion (reduce, no-preference)."""
        self._do("media", colors=colors, motion=motion)

    def authenticate(self, user: str, password: str) -> None:
        """Answer requests for a password."""
        self._do("authenticate", user=user, password=password)

    def screenshot(self, path: Path, *, full: bool = False) -> None:
        """Write a PNG of the window, or of the full page."""
        self._do("screenshot", path=str(path), full=full)

    def cpu_seconds(self) -> float:
        """Return the CPU time of the page's main thread since it was first asked."""
        return float(self._do("cpu"))

    def axe(self) -> list[str]:
        """Return the violations of axe-core's rules, one line each."""
        violations: list[str] = self._do("axe")
        return violations

    def problems(self) -> list[str]:
        """Return and forget errors, violations of the CSP and requests to other hosts."""
        problems: list[str] = self._do("problems")
        return problems

    def _do(self, name: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"name": name, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, f"{name}: {answer['error']}"
        return answer["value"]


@contextmanager
def open_page() -> Iterator[Page]:
    """Start a browser with an empty page."""
    process = subprocess.Popen(
        ["node", PACKAGES / "drive.mjs"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"CHROMIUM": shutil.which("chromium") or ""},
        text=True,
    )
    try:
        yield Page(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()
