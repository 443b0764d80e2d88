"""The answers about the ranks of a node, from the records of any source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from torchmem.explain.threats import Threat
from torchmem.node.ranks import ProcessFilter
from torchmem.node.state import OomWhy, RankWhy
from torchmem.node.words import oom_page
from torchmem.output.terminal import first_of, wrapped
from torchmem.sample.errors import UsageError
from torchmem.top.view import is_live
from torchmem.why import node_words as words
from torchmem.why import ooms, rank_table
from torchmem.why.answer import NodeAnswer
from torchmem.why.source import (
    MAX_REPORTS,
    Explanation,
    FoundRank,
    NodeSource,
    oom_data,
    ranks_on_gpus,
    selects,
)

MAX_NAMED = 8


class NodeTools:
    """The tools about ranks. Every method raises TorchmemError if it has no answer."""

    def __init__(self, source: NodeSource) -> None:
        self._source = source

    def most_urgent(self) -> NodeAnswer:
        """Explain the newest OOM, else the running rank that is worst off, else one that has ended.

        What is threatened comes first, then what has the smallest share of its GPU left.
        """
        oom = ooms.explained(self._source, None, ProcessFilter())
        if oom is not None:
            return self._explanation(oom)
        alive = [each for each in ranks_on_gpus(self._source.node()) if is_live(each.rank)]
        if not alive:
            return self._report(self._find(ProcessFilter(), "OOM report and no rank"))
        worst = min(alive, key=_ease)
        answer = self._report([each for each in alive if each.rank.id == worst.rank.id])
        count = len({each.rank.id for each in alive})
        chosen = (
            f"Of the {count} running ranks, {worst} is worst off; to see another one, pass --rank, "
            "--run or --pid."
        )
        text = "\n".join([*wrapped(chosen), "", answer.text])
        return replace(answer, text=text) if count > 1 else answer

    def why(self, selected: ProcessFilter) -> NodeAnswer:
        """Explain the only rank that matches: the OOM that it died of, else its memory."""
        try:
            found = self._find(selected)
        except UsageError:
            oom = ooms.explained(self._source, None, selected)
            if oom is None:
                raise
            return self._explanation(oom)  # the sample is gone, the report is not
        return self._explained(found)

    def about(self, id_: str) -> NodeAnswer:
        """Explain the rank with this id, likewise."""
        known = ranks_on_gpus(self._source.node())
        found = [each for each in known if each.rank.id == id_]
        return self._explained(found or self._none(ProcessFilter(), known))

    def _explained(self, found: list[FoundRank]) -> NodeAnswer:
        rank = found[0].rank
        # The last sample shows the memory after the error, the report that at the error.
        if rank.state == "oom":
            own = ProcessFilter(rank.rank, rank.run, rank.pid, rank.launch)
            oom = ooms.explained(self._source, None, own)
            if oom is not None:
                return self._explanation(oom)
        return self._report(found)

    def list_ranks(self, run: str | None = None) -> NodeAnswer:
        """Return the ranks, one for each GPU that they use."""
        node = self._source.node()
        answer = rank_table.answer(node, self._source.name, run)
        if not node.missing:
            return answer
        data = {"missing": node.missing, **answer.data}
        return replace(answer, text=f"{node.missing}\n\n{answer.text}", data=data)

    def rank_report(self, selected: ProcessFilter) -> NodeAnswer:
        """Return the report of a rank, as `torchmem top` shows it."""
        return self._report(self._find(selected))

    def _report(self, found: list[FoundRank]) -> NodeAnswer:
        whys = [self._source.why(each) for each in found]
        told = list(zip(found, whys, strict=True))
        pages = [words.report_page(*each) for each in told]
        devices = [{**_data(each), "why": _why_data(why)} for each, why in told]
        html = self._source.rank_page(found, whys, pages)
        return NodeAnswer("\n".join(pages), {"devices": devices}, html=html)

    def what_holds_memory(self, selected: ProcessFilter) -> NodeAnswer:
        """Return the parts of a rank's memory, and what held it at its newest OOM."""
        pages, devices = [], []
        for found in self._find(selected):
            why, recordings = self._source.why(found), self._source.recordings(found)
            pages.append(words.holders_page(found, why, recordings))
            oom = _oom_data(why.oom) or {}
            holders = {
                "gpu_parts": [asdict(part) for part in found.gpu.parts],
                "parts_at_peak": [asdict(part) for part in why.parts_at_peak],
                "listings": oom.get("listings", ()),
                "hidden": oom.get("hidden"),
                "recordings": [asdict(each) for each in recordings] or None,
            }
            devices.append({**_data(found), **holders})
        return NodeAnswer("\n".join(pages), {"devices": devices})

    def oom_reports(self, run: str | None = None, limit: int | None = MAX_REPORTS) -> NodeAnswer:
        """Return the newest OutOfMemoryErrors, of a run or of all."""
        found = [row for row, _ in ooms.newest(self._source, limit) if run in {None, row.run}]
        of_run = "" if run is None else f" of run {run}"
        text = words.oom_table(found) or f"{self._source.name} has no OOM report{of_run}.\n"
        return NodeAnswer(text, {"reports": [row.data() for row in found]}, "Pass `run`.")

    def explain_oom(self, file: str | None, selected: ProcessFilter) -> NodeAnswer:
        """Return what explains an OOM: that of a file, or the newest of the ranks that match."""
        found = ooms.explained(self._source, file, selected)
        if found is None:
            raise UsageError(
                f"{self._source.name} has no OOM report of such a rank: call oom_reports."
            )
        return self._explanation(found)

    def _find(self, selected: ProcessFilter, lacks: str = "rank") -> list[FoundRank]:
        """Return the GPUs of the only rank that matches, else of the one that ended last.

        `lacks`: what there is none of, where there is no rank at all.
        """
        known = ranks_on_gpus(self._source.node())
        matching = [each for each in known if selects(selected, each.rank)]
        alive = [each for each in matching if is_live(each.rank)]
        running = selected.newest(alive, lambda each: (each.rank.launch, each.rank.start_time))
        if len({each.rank.id for each in running}) > 1:
            raise UsageError(
                f"several ranks match: {_names(running)}; select one with rank, run, launch or pid."
            )
        if running or not matching:
            return running or self._none(selected, known, lacks)
        last = max(matching, key=lambda each: each.rank.sample_time or 0.0)
        return [each for each in matching if each.rank.id == last.rank.id]

    def _none(
        self, selected: ProcessFilter, known: list[FoundRank], lacks: str = "rank"
    ) -> list[FoundRank]:
        """Raise UsageError: no rank matches that uses a GPU."""
        node, source = self._source.node(), self._source
        for rank in node.waiting:
            if selects(selected, rank):
                who = f"rank {rank.rank} of run {rank.run} (pid {rank.pid})"
                raise UsageError(f"{who} has not used a GPU yet.")
        if node.missing:
            raise UsageError(f"no rank of {source.name} matches. {node.missing}")
        if known:
            raise UsageError(f"no rank of {source.name} matches; ranks: {_names(known)}.")
        raise UsageError(
            f"{source.name} has no {lacks}: start a process with `torchmem run -- COMMAND`, or "
            f"{source.elsewhere}."
        )

    def _explanation(self, found: Explanation) -> NodeAnswer:
        data = {**found.row.data(), "oom": _oom_data(found.oom), "leaks": found.leaks or None}
        text = oom_page(found.oom, found.row.file)
        return NodeAnswer(text, data, html=self._source.oom_page(found))


def _ease(found: FoundRank) -> tuple[bool, float, int]:
    """Return a key that is lower the worse off a rank is."""
    left, total = found.rank.headroom_flush_bytes, found.gpu.total_bytes
    share = 1.0 if left is None or not total else left / total
    return not found.rank.why, share, found.rank.rank or 0


def _names(found: list[FoundRank]) -> str:
    return first_of(list(dict.fromkeys(map(str, found))), MAX_NAMED)


_NOT_SHOWN = {
    *("uid", "local_rank", "active_bytes"),
    *("outside_allocator_bytes", "headroom_bytes", "stranded_bytes", "releasable_bytes"),
    *("largest_free_block_bytes", "read_steps"),
}
"""Numbers of a rank that are in its parts or in the facts of its report, too."""


def _data(found: FoundRank) -> dict[str, Any]:
    gpu, rank = found.gpu, found.rank
    known = {name: value for name, value in asdict(rank).items() if name not in _NOT_SHOWN}
    known["last_oom"] = rank.last_oom and oom_data(rank.last_oom)
    known["why"] = _texts(rank.why)
    return {"gpu": gpu.index, "uuid": gpu.uuid, "total_bytes": gpu.total_bytes, **known}


def _why_data(why: RankWhy) -> dict[str, Any]:
    """Return the answer about a rank, without charts: the text draws them."""
    known = asdict(replace(why, run=None, oom=None)) | {
        "threats": [asdict(each) for each in why.threats],
        "oom": _oom_data(why.oom),
    }
    return {name: value for name, value in known.items() if name not in {"id", "holds"}}


def _oom_data(oom: OomWhy | None) -> dict[str, Any] | None:
    return asdict(replace(oom, charts=())) if oom else None


def _texts(found: Iterable[Threat]) -> list[dict[str, str]]:
    return [{"text": each.text} for each in found]
