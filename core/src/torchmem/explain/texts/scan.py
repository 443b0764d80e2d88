"""Finds the messages of `formats` in a text of any size, in constant memory.

Only lines that contain a trigger of a format are looked at. To find them, a text is searched for
each trigger, at a few GB per second; a regular expression of all of them takes ten times as long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torchmem.explain.texts.formats import BY_NAME, FORMATS, TextFormat
from torchmem.explain.texts.judgment import Judged, judge_message
from torchmem.explain.texts.log_lines import MAX_LINE, LogLine, moment, read_line
from torchmem.explain.texts.numbers import Message, read_message
from torchmem.explain.texts.tables import TABLE_TRIGGERS, Table, read_table
from torchmem.sample.untrusted import printable

CHUNK_BYTES = 1 << 20
BEHIND_BYTES = 64 << 10
"""How much of the text before a message is kept, to find the step."""
AHEAD_BYTES = 16 << 10
"""How much of the text after the line of a message is there, for what continues it."""
NEAR_BYTES = 16 << 10
"""Other messages this near, in a text that names no ranks, may be those of other ranks."""
MAX_CONTINUATIONS = 40
MAX_WORDS = 600
MAX_RANKS = 4096
MAX_EXAMINED = 50_000
"""Lines with a trigger that are looked at, in all texts together."""
EXCERPT = 300

_WORD = "emory"
"""Most triggers contain this: one search finds all of them."""
_FALLBACK = BY_NAME["cut_off"]
_NEWLINE = re.compile(rb"[\r\n]")
_BEGINNING = re.compile(rb"out of memory[^\r\n]{0,60}")


def _literals(triggers: Iterable[str]) -> list[bytes]:
    """Return the triggers without those that contain another one."""
    names = sorted(set(triggers), key=len)
    kept = [name for at, name in enumerate(names) if not any(o in name for o in names[:at])]
    return [name.encode() for name in kept]


def _around(trigger: str) -> str:
    at = trigger.index(_WORD) + len(_WORD)
    before, after = re.escape(trigger[:at]), re.escape(trigger[at:])
    return f"(?<={before})" + (f"(?={after})" if after else "")


_TRIGGERS = {trigger for known in FORMATS for trigger in known.triggers} | TABLE_TRIGGERS
_WITH_WORD = re.compile(
    f"{_WORD}(?:{'|'.join(_around(each) for each in sorted(_TRIGGERS) if _WORD in each)})".encode()
)
_OTHERS = _literals(each for each in _TRIGGERS if _WORD not in each)


@dataclass(slots=True)
class Finding:
    """A kind of message: one format with one cause.

    Attributes:
        message: the first of them.
        judged: what it says of the cause.
        line: the number of its line in the text, from 1.
        rank: its rank; None if the text does not say.
        step: the step or iteration of the newest line before it that has one.
        time: its time, as text that sorts by time.
        excerpt: the beginning of it, printable.
        count: how many there are.
        ranks: the ranks that have it.
        source: the name of the text.
        table: what a pasted table says, instead of a message.
        newest: the newest of them.
    """

    message: Message | None
    judged: Judged
    line: int
    rank: int | None = None
    step: int | None = None
    time: str | None = None
    excerpt: str = ""
    count: int = 1
    ranks: set[int] = field(default_factory=set)
    source: str = ""
    table: Table | None = None
    newest: Finding | None = None

    @property
    def known(self) -> TextFormat | None:
        """The format; None for a table."""
        return self.message.format if self.message else None

    @property
    def key(self) -> tuple[object, ...]:
        """What makes it a kind of its own."""
        if self.table is not None:
            return "table", self.table.kind, self.table.gpu, self.source
        name = self.known.name if self.known else ""
        return name, self.judged.cause, self.judged.detail, self.judged.candidates

    @property
    def requested(self) -> int | None:
        """The size of the request that failed, in bytes, if the message says it."""
        return self.message.numbers.requested if self.message else None

    def add(self, other: Finding) -> None:
        """Count another message of this kind.

        NCCL writes two lines for one failure, of which the second has the size.
        """
        before, self.newest = self.newest or self, other
        is_next = (other.source, other.rank, other.line) == (
            before.source,
            before.rank,
            before.line + 1,
        )
        is_same = is_next and before.requested is None and other.requested is not None
        if not is_same:
            self.count += other.count
        elif self.requested is None:
            self.message = other.message


@dataclass(slots=True)
class Findings:
    """What was found in texts: kinds in the order of their first message, and bytes read."""

    kinds: dict[tuple[object, ...], Finding] = field(default_factory=dict)
    bytes_read: int = 0
    examined: int = 0

    def add(self, found: Finding) -> bool:
        """Count a message; return whether it is the first of its kind."""
        known = self.kinds.setdefault(found.key, found)
        if found.rank is not None and len(known.ranks) < MAX_RANKS:
            known.ranks.add(found.rank)
        if known is not found:
            known.add(found)
        return known is found


def scan(
    read: Callable[[int], bytes], findings: Findings, source: str = "", rank: int | None = None
) -> None:
    """Add what is found in a text to `findings`.

    `read` returns at most as many bytes as it is asked for, and none at the end. `rank` is the rank
    of the whole text, where no line says another one.
    """
    _Scan(findings, source, rank).run(read)


class _Scan:
    """One text. `_buffer[_at:]` is not searched yet; what is before it was."""

    def __init__(self, findings: Findings, source: str, rank: int | None) -> None:
        self._findings, self._source, self._rank = findings, source, rank
        self._buffer, self._at, self._line = b"", 0, 1
        self._done = 0
        self._buffer_start = 0

    def run(self, read: Callable[[int], bytes]) -> None:
        is_end = False
        while not is_end:
            chunk = read(CHUNK_BYTES)
            self._findings.bytes_read += len(chunk)
            is_end = not chunk
            self._buffer += chunk
            end = len(self._buffer) if is_end else len(self._buffer) - AHEAD_BYTES
            if end > self._at:
                self._search(end)

    def _search(self, end: int) -> None:
        """Look at the lines up to `end` in the buffer that contain a trigger."""
        before = self._at
        for start in self._starts(end):
            if self._buffer_start + start >= self._done:
                self._line += _newlines(self._buffer, before, start)
                before = max(before, start)
                self._done = self._buffer_start + self._examine(start)
        self._line += _newlines(self._buffer, before, end)
        kept = max(0, end - BEHIND_BYTES)
        self._buffer = self._buffer[kept:]
        self._buffer_start += kept
        self._at = end - kept

    def _starts(self, end: int) -> list[int]:
        """Return where the lines with triggers begin, at most MAX_LINE before these."""
        starts = set[int]()
        for literal in _OTHERS:
            at = self._buffer.find(literal, self._at, end)
            while at >= 0:
                starts.add(self._begin(at))
                at = self._buffer.find(literal, self._end(at), end)
        at = self._at
        while match := _WITH_WORD.search(self._buffer, at, end):
            starts.add(self._begin(match.start()))
            at = self._end(match.start())
        return sorted(starts)

    def _begin(self, at: int) -> int:
        least = max(0, at - MAX_LINE // 2)
        return (
            max(
                self._buffer.rfind(b"\n", least, at),
                self._buffer.rfind(b"\r", least, at),
                least - 1,
            )
            + 1
        )

    def _end(self, at: int, length: int = MAX_LINE // 2) -> int:
        most = min(len(self._buffer), at + length)
        match = _NEWLINE.search(self._buffer, at, most)
        return match.start() if match else most

    def _text(self, start: int) -> tuple[LogLine, int]:
        end = self._end(start, MAX_LINE)
        return read_line(self._buffer[start:end].decode(errors="replace")), end

    def _examine(self, start: int) -> int:
        """Add what the line at `start` says; return where it ends."""
        findings = self._findings
        line, end = self._text(start)
        if findings.examined >= MAX_EXAMINED:
            return end
        findings.examined += 1
        continued = _Continued(
            line,
            lambda: self._following(end),
            lambda: self._rank is None and self._is_mixed(start, end),
        )
        if table := read_table(line.text, continued.lines):
            self._add(start, line, Finding(None, Judged(None), self._line, table=table))
            return end
        for message in messages(line.text, continued.text):
            rank = line.rank_before(message.start)
            excerpt = printable(" ".join(line.text[message.start :][: 2 * EXCERPT].split()))
            self._add(
                start,
                line,
                Finding(
                    message,
                    judge_message(message),
                    self._line,
                    rank=self._rank if rank is None else rank,
                    time=line.time,
                    excerpt=excerpt[:EXCERPT],
                ),
            )
        return end

    def _add(self, start: int, line: LogLine, found: Finding) -> None:
        found.source = self._source
        if self._findings.add(found):
            step, time = moment(self._before(start), found.rank)
            found.step = step if line.step is None else line.step
            found.time = found.time or time

    def _following(self, end: int) -> Iterator[LogLine]:
        for _ in range(MAX_CONTINUATIONS):
            start = end + (2 if self._buffer[end : end + 2] == b"\r\n" else 1)
            if start >= len(self._buffer):
                return
            line, end = self._text(start)
            yield line

    def _is_mixed(self, start: int, end: int) -> bool:
        """Return whether messages with other beginnings stand near a line, as of other ranks."""
        own = set(_BEGINNING.findall(self._buffer, start, end))
        near = _BEGINNING.findall(self._buffer, max(0, start - NEAR_BYTES), end + NEAR_BYTES)
        return not own.issuperset(near)

    def _before(self, start: int) -> Iterator[LogLine]:
        """Yield the line at `start` and those before it, the newest first."""
        yield self._text(start)[0]
        text = self._buffer[max(0, start - BEHIND_BYTES) : start]
        for raw in reversed(_NEWLINE.split(text)):
            yield read_line(raw[:MAX_LINE].decode(errors="replace"))


def _newlines(buffer: bytes, start: int, end: int) -> int:
    return buffer.count(b"\n", start, end) if end > start else 0


class _Continued:
    """The lines of the same rank after a line, which are read only if they are needed.

    `is_mixed` returns whether lines without a rank may be those of several ranks.
    """

    def __init__(
        self,
        first: LogLine,
        following: Callable[[], Iterator[LogLine]],
        is_mixed: Callable[[], bool],
    ) -> None:
        self._first, self._following, self._is_mixed = first, following, is_mixed

    def lines(self) -> Iterator[str]:
        """Yield the texts of the lines without their labels."""
        for line in self._following():
            if line.rank == self._first.rank:
                yield line.body

    def text(self, start: int) -> str:
        """Return the first line from a place on, with the lines after it, as one line.

        Where messages of several ranks cannot be told apart, numbers of another one would be false:
        it is the first line alone.
        """
        words = self._first.text[start:].split()
        if self._first.rank is None and self._is_mixed():
            return " ".join(words)
        for line in self.lines():
            words += line.split()
            if len(words) > MAX_WORDS:
                break
        return " ".join(words[:MAX_WORDS])


def messages(line: str, continued: Callable[[int], str]) -> Iterator[Message]:
    """Yield the messages that begin in a line; `continued` returns the text from a place on."""
    at, found = 0, False
    while (first := _first(line, at)) is not None:
        known, match = first
        message = read_message(known, match, line)
        if known.chains and not message.is_whole:
            message = _longer(message, match, continued(match.start()))
        yield message
        at, found = max(match.end(), message.end), True
    begun = None if found else re.search(_FALLBACK.pattern, line)
    if begun:
        yield _wrapped(begun, continued(begun.start()))


def _wrapped(match: re.Match[str], text: str) -> Message:
    """Return the message whose beginning is on two lines, or that one is cut off."""
    first = _first(text, 0)
    if first is None or first[1].start() > len(match[0]) + 1:
        return read_message(_FALLBACK, match, match.string)
    known, again = first
    found = read_message(known, again, text)
    start = match.start()
    return replace(found, start=start, end=start + found.end, is_joined=True)


def _first(text: str, at: int) -> tuple[TextFormat, re.Match[str]] | None:
    """Return the first message from a place on; where several begin, that of the first format."""
    best = None
    for known in FORMATS:
        if known is not _FALLBACK and any(trigger in text for trigger in known.triggers):
            match = re.compile(known.pattern, re.MULTILINE).search(text, at)
            if match and (best is None or match.start() < best[1].start()):
                best = known, match
    return best


def _longer(message: Message, match: re.Match[str], text: str) -> Message:
    """Return the message with what continues it in the next lines."""
    again = re.match(message.format.pattern, text)
    if again is None:
        return message
    found = read_message(message.format, again, text)
    start = match.start()
    return replace(found, start=start, end=start + found.end, is_joined=True)


def in_time(findings: Sequence[Finding]) -> list[Finding]:
    """Return the kinds, the first in time first: as they were found, if a time is missing."""
    if any(found.time is None for found in findings):
        return list(findings)
    return sorted(findings, key=lambda found: found.time or "")
