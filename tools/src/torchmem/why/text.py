"""Why memory ran out, from any text: a message, or logs of any size and number of ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from torchmem.allocator.sizes import format_size
from torchmem.explain.remedy import Remedy, gain_sentence
from torchmem.explain.texts import words
from torchmem.explain.texts.advice import advice, next_command
from torchmem.explain.texts.scan import MAX_EXAMINED, Finding, Findings, in_time, scan
from torchmem.output.terminal import counted, first_of, joined, wrapped
from torchmem.sample.errors import UsageError
from torchmem.sample.file_kinds import MAX_FILE_BYTES
from torchmem.sample.untrusted import open_untrusted, sanitize_text

WIDTH = 88
MAX_KINDS = 12
MAX_NAMED_RANKS = 8
SUBJECT = 26
_RANK_IN_PATH = re.compile(r"(?:rank|local_rank)[-_.]?(\d{1,6})(?!\d)|/(\d{1,6})/std(?:out|err)")
_UTF16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}

Reader = Callable[[int], bytes]


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes:
        """Return at most as many bytes, and none at the end."""


@dataclass(frozen=True)
class TextAnswer:
    """What texts say: each kind of message once, the first in time first."""

    names: Sequence[str]
    findings: Findings

    @property
    def is_explained(self) -> bool:
        """Whether anything was explained, and not only named."""
        return bool(self._ooms or self._notices)

    @cached_property
    def _kinds(self) -> list[Finding]:
        return in_time(list(self.findings.kinds.values()))

    @cached_property
    def _ooms(self) -> list[Finding]:
        return self._of("oom")

    @cached_property
    def _notices(self) -> list[Finding]:
        return [*self._of("notice"), *(each for each in self._kinds if each.table)]

    def _of(self, role: str) -> list[Finding]:
        return [each for each in self._kinds if each.known and each.known.role == role]

    def words(self) -> str:
        """Return the explanations, then what followed, and what was passed over."""
        sections = [self._heading()]
        for number, found in enumerate(self._ooms[:MAX_KINDS], 1):
            sections += self._explained(found, number)
        left = len(self._ooms) - MAX_KINDS
        if left > 0:
            sections.append([f"{counted(left, 'more kind')} of messages: see --json."])
        sections += [list(_notice_lines(each)) for each in self._notices[:MAX_KINDS]]
        sections.append(list(self._consequence_lines()))
        sections.append(list(self._other_lines()))
        return joined(sections)

    def _heading(self) -> list[str]:
        if not self._ooms:
            return wrapped(f"{self._nothing()}{self._bound()}", width=WIDTH)
        first, ranks = self._ooms[0], self._ranks(self._ooms)
        where = _where(first, is_several=len(self.names) > 1)
        if len(ranks) > 1:
            who = f"{len(ranks)} ranks ran out of memory, the first was {where}"
        else:
            who = f"Memory ran out: {where}"
        return wrapped(f"{who}.{self._bound()}", width=WIDTH)

    def _bound(self) -> str:
        if self.findings.examined < MAX_EXAMINED:
            return ""
        return f" Only the first {MAX_EXAMINED:,} lines that may say so were looked at."

    def _nothing(self) -> str:
        if self._of("consequence"):
            return (
                "No message says that memory ran out. These ranks fell as a consequence of another "
                "one, whose log is not here."
            )
        if self._notices:
            return "No message says that memory ran out."
        size = format_size(self.findings.bytes_read)
        return f"No message says that memory ran out in {size} of text."

    @staticmethod
    def _ranks(findings: Sequence[Finding]) -> set[int]:
        return set().union(*(found.ranks for found in findings)) if findings else set()

    def _explained(self, found: Finding, number: int) -> Iterator[list[str]]:
        message, judged = found.message, found.judged
        if message is None:
            return
        where = _where(found, is_several=len(self.names) > 1)
        also = sorted(found.ranks - {found.rank})
        others = f", also on rank {first_of(also, MAX_NAMED_RANKS)}" if also else ""
        times = f", {found.count:,} times" if found.count > 1 else ""
        told = words.sentence(message, judged)
        heading = wrapped(f"{told}.", f"{number}. ", WIDTH)
        yield [*heading, *wrapped(f"{where}{times}{others}", "   ", WIDTH)]
        yield wrapped(words.reason(message, judged), "   ", WIDTH)
        yield list(_fact_lines(words.number_facts(message, judged)))
        yield list(_advice_lines(advice(message, judged), is_decided=not judged.candidates))
        unknown = "; ".join(words.cannot_say(message, judged))
        following = next_command(message, judged)
        more = wrapped(f"The text does not say {unknown}.", "   ", WIDTH) if unknown else []
        learn = wrapped(f"To learn {following.tells}:", "   ", WIDTH)
        yield [*more, *learn, f"       {following.line}"]

    def _consequence_lines(self) -> Iterator[str]:
        found = self._of("consequence")
        if not found:
            return
        yield "A consequence, not the cause"
        causing = self._ranks(self._ooms)
        for each in found:
            ranks = sorted(each.ranks - causing)
            plural = "s" * (len(ranks) != 1)
            who = f" on rank{plural} {first_of(ranks, MAX_NAMED_RANKS)}" if ranks else ""
            about = each.known.meaning if each.known else ""
            times = counted(each.count, "message")
            yield from wrapped(f"{times}{who}, from line {each.line:,}: {about}", "  - ", WIDTH)

    def _other_lines(self) -> Iterator[str]:
        for each in self._of("other"):
            if each.known:
                first = f"Passed over, {counted(each.count, 'message')} from {each.known.source}: "
                yield from wrapped(f"{first}{each.known.meaning}", width=WIDTH)

    def json_lines(self) -> list[str]:
        """Return one document about all texts."""
        return [json.dumps(self.document(), allow_nan=False)]

    def document(self) -> dict[str, Any]:
        """Return what was found, for JSON; what is unknown is null."""
        return {
            "texts": list(self.names),
            "bytes": self.findings.bytes_read,
            "explained": self.is_explained,
            "lines_examined": self.findings.examined,
            "messages": [document(each) for each in self._kinds],
        }

    def page(self) -> bytes:
        """Raise UsageError."""
        raise UsageError(
            "--html shows an OOM report or a rank; the exporter's page opens texts, too."
        )


def document(found: Finding) -> dict[str, Any]:
    """Return a kind of message for JSON."""
    place = {
        "text": found.source,
        "line": found.line,
        "rank": found.rank,
        "ranks": sorted(found.ranks),
        "step": found.step,
        "time": found.time,
        "count": found.count,
    }
    message, judged = found.message, found.judged
    if found.table is not None:
        said = words.table_sentence(found.table)
        return {"format": found.table.kind, "role": "table", "headline": said, **place} | {
            "numbers": asdict(found.table)
        }
    if message is None:
        return place
    following = next_command(message, judged)
    return {
        "format": message.format.name,
        "source": message.format.source,
        "role": message.format.role,
        "cause": judged.cause,
        "detail": judged.detail,
        "candidates": list(judged.candidates),
        "headline": words.sentence(message, judged),
        **place,
        "is_whole": message.is_whole,
        "numbers": asdict(message.numbers),
        "compaction_bytes": judged.compaction,
        "others": [asdict(holder) for holder in judged.holders],
        "unlisted_bytes": judged.unlisted,
        "own_pid": judged.own_pid,
        "meaning": message.format.meaning,
        "cannot_say": list(words.cannot_say(message, judged)),
        "advice": [{"text": r.text, "lines": list(r.lines)} for r in advice(message, judged)],
        "next": asdict(following) if message.format.role == "oom" else None,
        "excerpt": found.excerpt,
    }


def _where(found: Finding, *, is_several: bool) -> str:
    gpu = found.message.numbers.gpu if found.message else None
    parts = [
        "" if found.rank is None else f"rank {found.rank}",
        "" if gpu is None else f"cuda:{gpu}",
        "" if found.step is None else f"step {found.step:,}",
        found.time or "",
        f"line {found.line:,}" + (f" of {found.source}" if is_several else ""),
    ]
    return ", ".join(filter(None, parts))


def _notice_lines(found: Finding) -> Iterator[str]:
    if found.table is not None:
        said = f"{found.table.kind}, line {found.line:,}: {words.table_sentence(found.table)}."
        yield from wrapped(said, width=WIDTH)
        yield from _fact_lines(words.table_facts(found.table))
    elif found.known:
        said = f"{counted(found.count, 'message')} from line {found.line:,}: {found.known.meaning}"
        yield from wrapped(said, width=WIDTH)


def _fact_lines(facts: Iterator[tuple[str, int]]) -> Iterator[str]:
    for name, size in facts:
        yield f"   {name:<{SUBJECT}}{format_size(size):>12}"


def _advice_lines(found: Sequence[Remedy], *, is_decided: bool) -> Iterator[str]:
    if found:
        yield f"   What to do, {'most promising first' if is_decided else 'by cause'}"
    for number, remedy in enumerate(found, 1):
        yield from wrapped(f"{remedy.text}{gain_sentence(remedy)}", f"     {number}. ", WIDTH)
        yield from (f"            {line}" for line in remedy.lines)


def explain_files(paths: Sequence[Path]) -> TextAnswer:
    """Return the answer about text files, which belong together. Raise UsageError."""
    findings, names = Findings(), [sanitize_text(str(path)) for path in paths]
    for path, name in zip(paths, names, strict=True):
        with open_untrusted(path, MAX_FILE_BYTES) as (file, _):
            scan(decoded(file), findings, name, rank_in_path(name))
    return TextAnswer(names, findings)


def explain_stream(stream: Readable, name: str = "stdin") -> TextAnswer:
    """Return the answer about a text that is read once."""
    findings = Findings()
    scan(decoded(stream), findings, name)
    return TextAnswer([name], findings)


def rank_in_path(name: str) -> int | None:
    """Return the rank that the path of a log names, as torchrun and many programs write it."""
    match = _RANK_IN_PATH.search(name)
    return int(match[1] or match[2]) if match else None


def decoded(stream: Readable) -> Reader:
    """Return what reads a text as UTF-8: Windows PowerShell redirects in UTF-16."""
    import codecs

    first = stream.read(2)
    encoding = _UTF16.get(first)
    if encoding is None:
        rest = [first]
        return lambda size: rest.pop() if rest and rest[0] else stream.read(size)
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")

    def read(size: int) -> bytes:
        data = stream.read(size)
        return decoder.decode(data, not data).encode(errors="replace")

    return read
