"""The report of a fleet as Markdown."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence

from torchmem.allocator.sizes import format_size
from torchmem.explain.headline import ONSET_SUMMARIES
from torchmem.explain.oom_report import CAUSE_SUMMARIES, format_seconds
from torchmem.fleet.launches import OUTCOMES
from torchmem.fleet.report import MIN_FREE, MIN_STEPS, Bill, Ending, Fit, FleetReport, WholeCost
from torchmem.output.terminal import first_of

MAX_ROWS = 20
NONE = "–"
_MARKUP = re.compile(r"([\\`*_\[\]<>|#~&])")


def page(report: FleetReport, max_rows: int = MAX_ROWS) -> str:
    """Return the report; each table has at most `max_rows` rows."""
    sections = [
        [
            f"# GPU memory from {_day(report.start)} to {_day(report.end)}",
            "",
            f"{headline(report)}.",
        ],
        _costs(report),
        *(_bills(name, report, max_rows) for name in ("run", "user", "team", "namespace")),
        _endings(report, max_rows),
        _savings(report),
        _fits(report, max_rows),
        [f"- {note}" for note in report.notes],
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def headline(report: FleetReport) -> str:
    """Return the most important numbers as one sentence, without a full stop."""
    total = report.total
    ended = report.outcomes().get("oom", 0)
    launches = f"{ended} launch{'es' * (ended != 1)} out of memory"
    if report.cost:
        wasted = money(_wasted(report, report.cost))
        launches += f"; {wasted} of {money(report.cost.all_gpus)} {report.cost.currency} wasted"
    return (
        f"{hours(total.lost)} GPU-hours lost to restarts after OutOfMemoryErrors, "
        f"{hours(total.stranded + report.stranded_unattributed)} stranded and "
        f"{hours(total.idle + report.idle_unattributed)} idle, of {hours(report.all_gpus)} "
        f"GPU-hours in all; {launches}"
    )


def hours(value: float) -> str:
    """Return GPU-hours with the digits that count."""
    if 0 < value < 0.01:
        return "< 0.01"
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.{1 if value >= 1 else 2}f}"


def money(value: float) -> str:
    """Return an amount of money: cents below 100 only."""
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.2f}"


def _wasted(report: FleetReport, cost: WholeCost) -> float:
    """Return the cost of everything that was wasted, also of what has no owner."""
    known = report.total.cost.wasted if report.total.cost else 0.0
    return known + cost.idle_unattributed + cost.stranded_unattributed


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _costs(report: FleetReport) -> list[str]:
    total = report.total
    at_risk = sum(ending.gpu_hours for ending in report.endings if ending.outcome == "oom")
    amounts = [
        report.all_gpus,
        total.used,
        total.lost,
        total.stranded + report.stranded_unattributed,
        total.idle + report.idle_unattributed,
        total.empty,
    ]
    rows = [[title, hours(amount)] for title, amount in zip(_KINDS, amounts, strict=True)]
    cost, known = report.cost, total.cost
    if cost:
        of_kinds = [
            cost.all_gpus,
            known.used if known else None,
            known.lost if known else None,
            (known.stranded if known else 0.0) + cost.stranded_unattributed,
            (known.idle if known else 0.0) + cost.idle_unattributed,
            known.empty if known else None,
        ]
        for row, amount in zip(rows, of_kinds, strict=True):
            row.append(NONE if amount is None else money(amount))
    lines = list(_table(["", "GPU-hours", *([cost.currency] if cost else [])], rows))
    said = (
        f"Launches that ended out of memory had run {hours(at_risk)} GPU-hours. What of them was "
        "after the last checkpoint is lost, too; the metrics do not say when that was."
    )
    lines += ["", said]
    if report.idle_unattributed:
        lines.append(
            f"{hours(report.idle_unattributed)} idle GPU-hours are of GPUs on "
            "which NVML does not list the processes."
        )
    return lines


_KINDS = (
    "GPUs of all nodes",
    "held by ranks",
    "**lost**: waiting for a rank that ran out of memory, and starting again",
    "**stranded** between tensors, of GPUs at work",
    "**idle**: memory held, but no kernel for 10 minutes",
    "**empty**: given to a job, but without a process for 10 minutes",
)


def _bills(name: str, report: FleetReport, max_rows: int) -> list[str]:
    bills: Sequence[Bill] = getattr(report, f"by_{name}")
    named = [bill for bill in bills if getattr(bill, name)]
    if not named and name != "run":
        return []
    heading = [name.capitalize(), *(["User", "Team"] if name == "run" else [])]
    kinds = ["Held", "Lost", "Stranded", "Idle", "Empty"]
    if report.cost:
        kinds += [f"Held, {report.cost.currency}", f"Wasted, {report.cost.currency}"]
    columns = ["run", "user", "team"] if name == "run" else [name]
    rows = [
        [
            *(_words(getattr(bill, column)) for column in columns),
            *map(hours, (bill.used, bill.lost, bill.stranded, bill.idle, bill.empty)),
            *(_bill_cost(bill) if report.cost else []),
        ]
        for bill in bills[:max_rows]
    ]
    title = f"## GPU-hours by {name}"
    table = _table([*heading, *kinds], rows, words=len(heading))
    return [title, "", *table, *_more(len(bills), max_rows)]


def _bill_cost(bill: Bill) -> list[str]:
    """Return what was held and what was wasted, in money."""
    return [NONE, NONE] if bill.cost is None else [money(bill.cost.used), money(bill.cost.wasted)]


def _endings(report: FleetReport, max_rows: int) -> list[str]:
    counts = report.outcomes()
    if not counts:
        return ["## What ended runs", "", "No run was seen."]
    lines = ["## What ended runs", ""]
    outcomes = [[text, str(counts[name])] for name, text in OUTCOMES.items() if name in counts]
    lines += _table(["Launches", "Number"], outcomes)
    ooms = sorted(report.ooms().items(), key=lambda item: -item[1])
    rows = [[_cause(cause), _onset(onset), str(number)] for (cause, onset), number in ooms]
    if rows:
        lines += ["", *_table(["Cause", "Why now", "Launches"], rows, words=2)]
    listed = [ending for ending in report.endings if ending.outcome not in {"exited", "running"}]
    if listed:
        lines += ["", *_ended(listed[:max_rows]), *_more(len(listed), max_rows)]
    return lines


def _cause(cause: str) -> str:
    summary = CAUSE_SUMMARIES.get(cause)  # type: ignore[call-overload]
    return f"{cause}: {summary}" if summary else "unknown"


def _onset(onset: str) -> str:
    summary = ONSET_SUMMARIES.get(onset)  # type: ignore[call-overload]
    return f"{onset}: {summary}" if summary else "unknown"


def _ended(endings: Sequence[Ending]) -> Iterator[str]:
    rows = [
        [
            _day(ending.end),
            _words(ending.run),
            _words(ending.user),
            str(ending.ranks),
            how(ending),
            hours(ending.gpu_hours),
            NONE if ending.back_seconds is None else format_seconds(ending.back_seconds),
        ]
        for ending in endings
    ]
    heading = ["Ended", "Run", "User", "Ranks", "How", "GPU-hours", "Started again after"]
    return _table(heading, rows, words=5)


def how(ending: Ending) -> str:
    """Return how a launch ended, with cause and onset."""
    known = ", ".join(word for word in (ending.cause, ending.onset) if word)
    return OUTCOMES[ending.outcome] + (f" ({_words(known)})" if known else "")


def _savings(report: FleetReport) -> list[str]:
    if not report.savings:
        return []
    rows = [
        [
            f"{saving.remedy}.",
            str(saving.launches),
            hours(saving.gpu_hours),
            first_of(list(map(_words, saving.runs)), 3),
        ]
        for saving in report.savings
    ]
    heading = ["Change", "Launches", "GPU-hours", "Runs"]
    return ["## What would have saved them", "", *_table(heading, rows, words=1)]


def _fits(report: FleetReport, max_rows: int) -> list[str]:
    if not report.fits:
        return []
    rows = [
        [
            _words(fit.run),
            _words(fit.user),
            hours(fit.gpu_hours),
            f"{format_size(round(fit.need_bytes))} of {format_size(round(fit.total_bytes))}",
            _smaller(fit),
            NONE if fit.batch_factor is None else f"{fit.batch_factor:.1f} times",
        ]
        for fit in report.fits[:max_rows]
    ]
    heading = ["Run", "User", "GPU-hours", "Needs at the peak", "Would fit", "Or a batch of"]
    said = (
        f"Runs of at least {MIN_STEPS} steps that did not run out of memory. The need is that of "
        "the worst rank at its peak, without PyTorch's cache; "
        f"{MIN_FREE:.0%} of the GPU stays free."
    )
    return [
        "## Runs that would fit a smaller GPU or a larger batch",
        "",
        said,
        "",
        *_table(heading, rows, words=2),
        *_more(len(report.fits), max_rows),
    ]


def _smaller(fit: Fit) -> str:
    if fit.gpu is None or fit.gpu_bytes is None:
        return NONE
    return f"{fit.gpu} ({format_size(fit.gpu_bytes)})"


def _words(text: str) -> str:
    """Return a name as text of Markdown: names are chosen by users."""
    return _MARKUP.sub(r"\\\1", text) if text else NONE


def _more(number: int, max_rows: int) -> list[str]:
    return ["", f"And {number - max_rows:,} more; --rows shows them."] if number > max_rows else []


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> Iterator[str]:
    """Yield the lines of a table; the columns after the first `words` are right-aligned."""
    yield f"| {' | '.join(heading)} |"
    yield f"|{'|'.join('---' if column < words else '--:' for column in range(len(heading)))}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
