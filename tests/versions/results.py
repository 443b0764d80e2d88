"""Reads pytest's report of the core, and records it in results.json."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path

from docs.generate.versions import RESULTS, Result, order, results

_MAX_REASON = 200


def junit_result(python: str, torch: str, report: Path) -> Result:
    """Return the result that pytest has written with --junitxml."""
    found: dict[str, dict[str, str]] = {"failure": {}, "error": {}, "skipped": {}}
    passed = 0
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - our own pytest has written it
        children = [child for child in case if child.tag in found]
        passed += not children
        for child in children:
            reason = " ".join(child.get("message", "").split())[:_MAX_REASON]
            found[child.tag][case.get("name", "").removeprefix("test_")] = reason
    return Result(python, torch, passed, found["failure"] | found["error"], found["skipped"])


def record(result: Result, path: Path = RESULTS) -> None:
    """Put a result in place of that of the same minor versions."""
    rows = {row.pair: row for row in (results(path) if path.exists() else [])}
    rows[result.pair] = result
    pairs = sorted(rows, key=lambda pair: (order(pair[1]), order(pair[0])))
    lines = ",\n".join(json.dumps(asdict(rows[pair])) for pair in pairs)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
