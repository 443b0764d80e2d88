"""A line of a log without what launchers and log collectors put around it.

Colors, timestamps, ranks, and JSON: Docker's and Kubernetes' log files, and structured logging.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_LINE = 64 << 10
"""Characters of a line that are read: those around what was found in it."""

_ESCAPES = re.compile(
    r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])"
)
_TIME = re.compile(
    r"(?P<date>\d{4}[-/]\d\d[-/]\d\d)[T ](?P<time>\d\d:\d\d:\d\d)(?P<part>[.,]\d{1,9})?"
)
LABELS = (
    re.compile(r"^\s*\[\d{1,4},(\d{1,6})\]\s?<std(?:out|err)>:?"),  # mpirun --tag-output
    re.compile(r"(?i)(?<![\w.])(?<!lora )(?:global[_ ]?)?rank[ =:]{0,2}(\d{1,6})\b\]?:?"),
    re.compile(r"^\s*\[[a-z_]{1,32}?(\d{1,6})\]:"),  # torchrun's role and local rank
    re.compile(r"^\s*(\d{1,6}): "),  # srun --label
    re.compile(r"\b(?:TP|Worker_TP)(\d{1,4})\b"),  # SGLang and vLLM
)
LABEL_COLUMNS = 400
"""Where a label may stand: before the message, and not in a whole paragraph before it."""
JSON_TEXTS = ("log", "message", "msg", "text", "body", "line", "textPayload", "event")
JSON_RANKS = ("rank", "global_rank", "RANK", "proc_rank")
_JSON_TIMES = ("time", "timestamp", "ts", "@timestamp", "asctime")
_JSON_STEPS = ("iteration", "step", "global_step")
_STEPS = (
    re.compile(
        r"(?i)\b(?:iteration|iter|global[_ ]?step|step)s?['\"]?\s?[ =:#]\s{0,12}(\d{1,12})\b"
    ),
    re.compile(r"(?i)\biter\((?:train|val)\)\s*\[\s*(\d{1,12})/\d{1,12}\]"),
    re.compile(r"\|\s*(\d{1,12})/\d{1,12} \["),  # tqdm
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """What a line says, and what was around it; None if that was not there.

    Attributes:
        text: the text of the program.
        rank: the rank that a label or a field of JSON gives.
        label: where a label of the rank ends in the text; 0 without one.
        time: date and time of day, as text that sorts by time.
        step: the step that a field of JSON gives.
    """

    text: str
    rank: int | None = None
    label: int = 0
    time: str | None = None
    step: int | None = None

    def rank_before(self, at: int) -> int | None:
        """Return the rank of what stands at a place in the text."""
        return self.rank if self.rank is not None else _label(self.text[:at])[0]

    @property
    def body(self) -> str:
        """The text after the label of a rank, or the mark of a quotation, at its beginning."""
        return self.text[self.label :].lstrip("> ")


def read_line(raw: str) -> LogLine:
    """Return what a line says."""
    text = _ESCAPES.sub("", raw) if "\x1b" in raw else raw
    start = text.find("{")
    if 0 <= start <= LABEL_COLUMNS and text.rstrip().endswith("}"):
        unwrapped = _unwrapped(text[start:])
        if unwrapped is not None:
            return unwrapped
    if "\\n" in text:  # JSON that is cut off, or the repr of a text
        text = text.replace("\\n", "\n").replace('\\"', '"')
    rank, label = _label(text[:LABEL_COLUMNS])
    return LogLine(text, rank, label, _time(text[:LABEL_COLUMNS]))


def _unwrapped(text: str) -> LogLine | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    inner = next((found[key] for key in JSON_TEXTS if isinstance(found.get(key), str)), None)
    if inner is None:
        return None
    line = read_line(inner[:MAX_LINE].rstrip("\n"))
    rank, time = _integer(found, JSON_RANKS), _json_time(found)
    return LogLine(
        line.text,
        line.rank if rank is None else rank,
        line.label,
        time or line.time,
        _integer(found, _JSON_STEPS),
    )


def _integer(found: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = str(found.get(key, ""))
        if re.fullmatch(r"[0-9]{1,12}", value):
            return int(value)
    return None


def _json_time(found: Mapping[str, Any]) -> str | None:
    texts = (found[key] for key in _JSON_TIMES if isinstance(found.get(key), str))
    return next(filter(None, map(_time, texts)), None)


def _label(text: str) -> tuple[int | None, int]:
    """Return the last rank that a label in the text gives, and where the label ends."""
    for number, pattern in enumerate(LABELS):
        matches = [*pattern.finditer(text)]
        if matches:
            last = matches[-1] if number else matches[0]
            return int(last[1]), last.end() if _is_beginning(text, last.start()) else 0
    return None, 0


def _is_beginning(text: str, at: int) -> bool:
    """Return whether only a bracket or a timestamp stands before a place."""
    return not re.search(r"[A-Za-z]{3}", text[:at])


def _time(text: str) -> str | None:
    match = _TIME.search(text)
    if match is None:
        return None
    date, part = match["date"].replace("/", "-"), (match["part"] or "").replace(",", ".")
    return f"{date} {match['time']}{part}"


def step_of(line: LogLine) -> int | None:
    """Return the step or iteration that a line names; the last one if it names several."""
    if line.step is not None:
        return line.step
    for pattern in _STEPS:
        matches = [*pattern.finditer(line.text)]
        if matches:
            return int(matches[-1][1])
    return None


def moment(lines: Iterable[LogLine], rank: int | None) -> tuple[int | None, str | None]:
    """Return the step and the time in the lines of a rank, which come the newest first.

    Each is None if no line has one; a step of another rank counts if that rank's lines have none.
    """
    step = other = time = None
    for line in lines:
        is_own = line.rank in {rank, None}
        found = step_of(line) if step is None else None
        if is_own:
            step = found if step is None else step
            time = line.time if time is None else time
        elif other is None:
            other = found
        if step is not None and time is not None:
            break
    return other if step is None else step, time
