"""Answers about the ranks of a node from its exporter, in the words that its live page shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from torchmem.allocator.sizes import format_size
from torchmem.capture.processes import ProcessFilter
from torchmem.cli.http import without_credentials
from torchmem.cli.terminal import joined, wrapped
from torchmem.explain.gpu_name import gpu_name
from torchmem.explain.oom_report import format_seconds
from torchmem.mcp import ranks
from torchmem.mcp.answer import MAX_REPORTS, ToolAnswer
from torchmem.metrics.memory_parts import PARTS
from torchmem.oom.text import advice_lines, memory_lines
from torchmem.sample.errors import TorchmemError, UsageError
from torchmem.top.node import (
    AwayError,
    ExplainedOom,
    Gpu,
    MemoryShare,
    NewestOom,
    Node,
    Rank,
    RankAnswer,
    ask,
    ask_rank,
)
from torchmem.top.reading import rank_lines
from torchmem.top.start import START
from torchmem.top.view import is_live

WIDTH = 88


@dataclass(frozen=True, slots=True)
class _Found:
    """A rank on a GPU; `time` is that of the answer."""

    gpu: Gpu
    rank: Rank
    time: float


class ExporterNode:
    """The ranks that an exporter knows. Its answers raise TorchmemError if it does not respond."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._name = without_credentials(url)

    def list_ranks(self, run: str | None = None) -> ToolAnswer:
        """Return the ranks, one for each GPU that they use."""
        node = self._node()
        answer = ranks.answer(ranks.of_node(node), self._name, run)
        if not node.missing:
            return answer
        data = {"missing": node.missing, **answer.data}
        return replace(answer, text=f"{node.missing}\n\n{answer.text}", data=data)

    def rank_report(self, selected: ProcessFilter) -> ToolAnswer:
        """Return what the live page shows about a rank, which `torchmem report` prints."""
        found = self._find(selected)
        answers = [(each, self._why(each)) for each in found]
        pages = [
            joined([rank_lines(each.gpu, each.rank, why, each.time, WIDTH)])
            for each, why in answers
        ]
        devices = [
            {**_data(each), "why": msgspec.to_builtins(msgspec.structs.replace(why, run=None))}
            for each, why in answers
        ]
        return ToolAnswer("\n".join(pages), {"devices": devices})

    def what_holds_memory(self, selected: ProcessFilter) -> ToolAnswer:
        """Return the parts of a rank's memory."""
        found = self._find(selected)
        pages = [
            joined([_heading(each), [*_rank_parts(each)], [*_gpu_parts(each)]]) for each in found
        ]
        return ToolAnswer("\n".join(pages), {"devices": list(map(_data, found))})

    def oom_reports(self, run: str | None = None) -> ToolAnswer:
        """Return the newest OutOfMemoryError of each rank."""
        newest = _out_of_memory(_matching(_all(self._node()), ProcessFilter(run=run)))
        found = [(each, oom, self._headline(each, oom)) for each, oom in newest[:MAX_REPORTS]]
        lines = [line for each in found for line in _oom_lines(*each)]
        none = f"No rank that {self._name} knows has run out of memory."
        data = [
            {
                "run": each.rank.run,
                "launch": each.rank.launch,
                "rank": each.rank.rank,
                "pid": each.rank.pid,
                **msgspec.to_builtins(oom),
                "headline": headline,
            }
            for each, oom, headline in found
        ]
        return ToolAnswer(joined([lines or [none]]), {"reports": data}, "Pass `run`.")

    def explain_oom(self, file: str | None, selected: ProcessFilter) -> ToolAnswer:
        """Return the report of the newest OutOfMemoryError of the ranks that match."""
        if file is not None:
            raise UsageError("an exporter shows no files: pass `run` and `rank` instead of `file`.")
        for each, _ in _out_of_memory(_matching(_all(self._node()), selected)):
            oom = self._why(each).oom
            if oom:
                data = {**_data(each), "oom": msgspec.to_builtins(oom)}
                return ToolAnswer(_oom_page(each, oom), data)
        raise UsageError(f"{self._name} has no OOM report of such a rank: call oom_reports.")

    def _headline(self, found: _Found, oom: NewestOom) -> str:
        """Return the verdict of the report, or cause and onset if the exporter has no report."""
        why = ask_rank(self._url, found.gpu.uuid, found.rank.id)
        if why is not None and why.oom is not None:
            return why.oom.summary
        return ", ".join(word for word in (oom.cause, oom.onset) if word)

    def _node(self) -> Node:
        try:
            return ask(self._url)
        except AwayError as error:
            raise TorchmemError(f"{self._name} {error}. {START}") from None

    def _why(self, found: _Found) -> RankAnswer:
        why = ask_rank(self._url, found.gpu.uuid, found.rank.id)
        if why is None:
            raise TorchmemError(f"{self._name} does not explain {_name(found)}: try again.")
        return why

    def _find(self, selected: ProcessFilter) -> list[_Found]:
        """Return the GPUs of the only rank that matches, if possible one that runs."""
        known = _all(self._node())
        matching = _matching(known, selected)
        alive = [each for each in matching if is_live(each.rank)]
        running = selected.newest(alive, lambda each: (each.rank.launch, each.rank.start_time))
        ids = {each.rank.id for each in running or matching}
        if len(ids) == 1:
            return running or matching
        names = ", ".join(dict.fromkeys(_name(each) for each in (running or matching or known)[:8]))
        if ids:
            raise UsageError(
                f"several ranks match: {names}; select one with rank, run, launch or pid."
            )
        raise UsageError(f"no rank that {self._name} knows matches; ranks: {names or 'none'}.")


def _all(node: Node) -> list[_Found]:
    now = node.time or 0.0
    return [_Found(gpu, rank, now) for gpu in node.gpus for rank in gpu.ranks]


def _matching(found: Sequence[_Found], selected: ProcessFilter) -> list[_Found]:
    return [
        each
        for each in found
        if selected.rank in {None, each.rank.rank}
        and selected.run in {None, each.rank.run}
        and selected.launch in {None, each.rank.launch}
        and selected.pid in {None, each.rank.pid}
    ]


def _out_of_memory(found: Iterable[_Found]) -> list[tuple[_Found, NewestOom]]:
    """Return those that ran out of memory, the newest error first."""
    failed = [(each, each.rank.last_oom) for each in found if each.rank.last_oom]
    return sorted(failed, key=lambda item: -(item[1].timestamp or 0.0))


def _name(found: _Found) -> str:
    return f"rank {found.rank.rank} of run {found.rank.run} (pid {found.rank.pid})"


def _heading(found: _Found) -> list[str]:
    index, uuid = found.gpu.index, found.gpu.uuid
    gpu = uuid if index is None else gpu_name(index, uuid, index)
    read = found.rank.stats_time
    age = "" if read is None else f", read {format_seconds(max(0.0, found.time - read))} ago"
    named = " ".join(filter(None, (gpu, found.gpu.name)))
    return [f"{_name(found)}: {found.rank.state}", f"{named}{age}"]


def _data(found: _Found) -> dict[str, Any]:
    gpu, rank = found.gpu, msgspec.to_builtins(found.rank)
    return {"gpu": gpu.index, "uuid": gpu.uuid, "total_bytes": gpu.total_bytes, **rank}


def _rank_parts(found: _Found) -> Iterator[str]:
    if found.rank.parts:
        yield "Memory of the rank"
    for label, size in sorted(_labeled(found.rank.parts), key=lambda part: -part[1]):
        yield f"  {label:<32}{format_size(size):>12}"


def _gpu_parts(found: _Found) -> Iterator[str]:
    """Yield the parts of the GPU, of all its ranks together."""
    yield from memory_lines(found.gpu.total_bytes, _labeled(found.gpu.parts))


def _labeled(parts: Iterable[MemoryShare]) -> list[tuple[str, int]]:
    return [(use.label or _words(use.name), use.bytes) for use in parts]


def _words(name: str) -> str:
    known = PARTS.get(name)
    return known.words if known else name


def _oom_lines(found: _Found, oom: NewestOom, headline: str) -> Iterator[str]:
    ago = format_seconds(max(0.0, found.time - (oom.timestamp or found.time)))
    size = "" if oom.requested_bytes is None else f", {format_size(oom.requested_bytes)} requested"
    line = f" at {oom.line}" if oom.line else ""
    yield f"{_name(found)}{size}{line}, {ago} ago"
    yield from wrapped(f"{headline}.", "    ", WIDTH)


def _oom_page(found: _Found, oom: ExplainedOom) -> str:
    sections = [
        [*wrapped(f"{oom.summary}.", width=WIDTH), *_heading(found)],
        *_listings(oom),
        wrapped(oom.reason, width=WIDTH),
        list(memory_lines(found.gpu.total_bytes, _labeled(oom.parts))),
        wrapped(oom.before, width=WIDTH),
        list(advice_lines(oom.advice)),
    ]
    return joined(sections)


def _listings(oom: ExplainedOom) -> Iterator[list[str]]:
    for listing in oom.listings:
        yield [listing.title, *(f"  {line}" for line in listing.text.splitlines())]
    if oom.hidden:
        yield ["The exporter shows the program's lines only to the rank's own user."]
