"""The screen of `torchmem top`: GPUs as bars, their ranks, and the selected rank in detail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from torchmem.allocator.sizes import format_index
from torchmem.explain.oom_report import format_seconds
from torchmem.explain.parts import PartBytes
from torchmem.metrics import colors
from torchmem.node.state import GpuNote, GpuState, NodeState, RankState, RankWhy
from torchmem.node.words import sparkline
from torchmem.output.terminal import counted
from torchmem.top.bars import UseStyles, gib
from torchmem.top.columns import MIN_RUN_COLUMNS, fitting, fixed_width
from torchmem.top.history import SeenHistory
from torchmem.top.reading import help_lines, rank_lines, verdict_lines, whole_run
from torchmem.top.signs import in_ascii
from torchmem.top.start import EXPORTER_WAYS, RANK_WAYS, Way
from torchmem.top.view import WAITING, RankKey, View, is_live, keys

MIN_BODY_LINES = 6
WIDE_COLUMNS = 120
"""From this width on, GPUs have their names, and each rank has its own bar."""
NAME_COLUMNS = 22
FREE_COLUMNS = 19
SENSOR_COLUMNS = 15
MIN_SENSOR_WIDTH = 56
"""Below this width, GPUs are shown without temperature, power and utilization."""
MAX_RUN_COLUMNS = 40
DETAIL_LINES = 10
"""What the lines about the selected rank usually take, so that the others rarely move."""
INDENT = 7
PAST_COLUMNS, DURATION_COLUMNS = 50, 14
"""What the line of a rank's past takes beside its two sparklines, and for its duration."""
MAX_SPARKS = 60


@dataclass(frozen=True, slots=True)
class Screen:
    """What to draw.

    Attributes:
        away: why the exporter has not answered for `away_seconds`.
        is_silent: whether nothing answers at its address.
        seen: when it last answered, in Unix seconds.
        status: shown before the keys.
        answers: what is known about single ranks.
        is_ascii: whether the terminal has no other characters.
    """

    node: NodeState | None
    url: str
    view: View = field(default_factory=View)
    away: str | None = None
    is_silent: bool = False
    away_seconds: int = 0
    seen: float | None = None
    status: str | None = None
    answers: Mapping[RankKey, RankWhy] = field(default_factory=dict)
    history: SeenHistory = field(default_factory=SeenHistory)
    is_ascii: bool = False


def drawn(screen: Screen, console: Console, height: int | None = None) -> Text:
    """Return the screen in the size of the console, or `height`; the selected rank is in sight."""
    height = height or console.height
    painter = _Painter(screen, console)
    full = painter.full_page()
    lines = _list(painter, height) if full is None else _reading(painter, full, height)
    return _joined(screen, console, lines[:height])


def picture(screen: Screen, console: Console, lines: int) -> Text:
    """Return the screen without its keys, for output that stays: at most `lines` lines."""
    drawn_lines = _list(_Painter(screen, console), lines + 1)[:-1]
    return _joined(screen, console, [*_without_gap(drawn_lines), Text()])


def _without_gap(lines: Iterable[Text]) -> Iterator[Text]:
    return (line for line in lines if line.plain.strip())


def last_line(screen: Screen, console: Console) -> int:
    """Return the highest line at which the help or the report may start; 0 for the list."""
    painter = _Painter(screen, console)
    full = painter.full_page()
    return 0 if full is None else max(0, len(full) - _room(painter, console.height))


def _room(painter: _Painter, height: int) -> int:
    """Return the number of lines between the top of a page and its footer."""
    return max(1, height - len([*painter.title(), *painter.problems()]) - 1)


def _reading(painter: _Painter, full: Sequence[Text], height: int) -> list[Text]:
    room = _room(painter, height)
    start = max(0, min(painter.scroll, len(full) - room))
    body = [*full[start : start + room]]
    body += [Text()] * (room - len(body))
    footer = painter.footer(start, len(full), room)
    return [*painter.title(), *painter.problems(), *body, footer]


def _list(painter: _Painter, height: int) -> list[Text]:
    top = [*painter.title(), *painter.problems(), *painter.header()]
    room = height - len(top) - 1
    rows, _ = painter.rows()
    bottom = painter.detail()
    bottom = bottom[: max(0, room - min(len(rows), MIN_BODY_LINES))]
    spare = room - max(len(bottom), DETAIL_LINES) - len(rows)
    rows, selected = painter.rows(spare)
    count = len(rows)
    past = painter.whole_run()
    bottom += past if len(past) <= room - count - len(bottom) else []
    room -= len(bottom)
    start = _start(selected, count, room)
    body = [draw() for draw in rows[start : start + room]]
    body += [Text()] * (room - len(body))
    if painter.is_old:
        for line in (*body, *bottom):
            line.stylize("dim")
    return [*top, *body, *bottom, painter.footer(start, count, room)]


def _joined(screen: Screen, console: Console, lines: Iterable[Text]) -> Text:
    fitted = Text("\n").join(_fitted(line, console.width) for line in lines)
    return in_ascii(fitted) if screen.is_ascii else fitted


def page(screen: Screen, console: Console) -> Text:
    """Return all GPUs and ranks, and what there is to know about each rank, for `--once`."""
    painter = _Painter(screen, console, has_cursor=False)
    rows, _ = painter.rows()
    body = (draw() for draw in rows)
    top = [*painter.title(), *painter.problems(), *painter.header()]
    lines = [*top, *body, *painter.all_parts(), *painter.whys(), *painter.ages()]
    return _joined(screen, console, [*lines, Text()])


class _Painter:
    """The lines of one screen."""

    def __init__(self, screen: Screen, console: Console, *, has_cursor: bool = True) -> None:
        self._screen, self._console, self._width = screen, console, console.width
        self._node = screen.node or NodeState()
        self._groups = screen.view.groups(self._node)
        self._position = screen.view.position(self._groups) if has_cursor else -1
        legend = [(entry.name, entry.label, entry.color) for entry in self._node.legend]
        has_colors = console.color_system in {"256", "truecolor"} and not console.no_color
        self._looks = UseStyles(legend, has_colors=has_colors)
        self._is_wide = self._width >= WIDE_COLUMNS
        self._columns = fitting(self._width)
        run = self._width - fixed_width(self._columns)
        self._run_columns = max(MIN_RUN_COLUMNS, min(MAX_RUN_COLUMNS, run // (1 + self._is_wide)))

    @property
    def scroll(self) -> int:
        """The first line of the help or report to show."""
        return self._screen.view.scroll

    @property
    def is_old(self) -> bool:
        """Whether the exporter has answered before, but not now."""
        return self._screen.away is not None and self._screen.node is not None

    def full_page(self) -> list[Text] | None:
        """Return the lines of the help or of the open report; None for the list."""
        if self._screen.view.is_help:
            return self._texts(help_lines(self._width))
        selected = self._selected()
        if not self._screen.view.is_open or selected is None:
            return None
        gpu, rank = selected
        answer = self._answer(gpu, rank)
        if gpu is WAITING:
            return [Text("This rank has not used a GPU yet.", style="dim")]
        if answer is None:
            return [Text("Asking for the report of this rank …", style="dim")]
        return self._texts(rank_lines(gpu, rank, answer, self._node.time, self._width))

    def _answer(self, gpu: GpuState, rank: RankState) -> RankWhy | None:
        return self._screen.answers.get((gpu.uuid, rank.id))

    def _texts(self, lines: Iterable[str]) -> list[Text]:
        """Return lines as texts, titles in bold; what is too long goes on in the next line."""
        texts = (Text(line, style="" if line.startswith(" ") else "bold") for line in lines)
        return [piece for text in texts for piece in self._wrapped(text) or [Text()]]

    def title(self) -> Iterator[Text]:
        """Yield the node with its counts."""
        ranks = [rank for gpu in self._node.gpus for rank in gpu.ranks] + [*self._node.waiting]
        counts = [counted(len(self._node.gpus), "GPU"), counted(len(ranks), "rank")]
        left = Text.assemble(("torchmem top", "bold"), "  ", (self._node.node, "bold cyan"))
        if self._screen.node:
            left.append("  " + ", ".join(counts) + "  sizes in GiB", style="dim")
        gap = self._width - left.cell_len - cell_len(self._screen.url)
        if gap > 1:
            left.append(" " * gap).append(self._screen.url, style="dim")
        yield left

    def header(self) -> Iterator[Text]:
        """Yield the names of the columns."""
        if self._screen.node:
            yield self._line("  ", {column.name: (column.name, "dim") for column in self._columns})

    def problems(self) -> Iterator[Text]:
        """Yield why the screen is incomplete or out of date."""
        if self._screen.away:
            yield from self._away(self._screen.away)
        elif not self._screen.node:
            yield Text(f"Asking {self._screen.url} …", style="dim")
        if not self._node.nvml.up:
            reason = self._node.nvml.text or "The reason is unknown."
            yield from self._wrapped(Text(f"NVML does not respond. {reason}", colors.ATTENTION))
        if self._node.missing:
            yield from self._wrapped(Text(self._node.missing, colors.ATTENTION))

    def _away(self, reason: str) -> Iterator[Text]:
        """Yield since when the exporter has not answered, and how to start one if it never has."""
        seen, is_old = self._screen.seen, self.is_old
        last = "" if seen is None else f" Last seen {_clock(seen)}."
        warning = "OUT OF DATE: " if is_old else ""
        retry = f" Retrying for {format_seconds(self._screen.away_seconds)}."
        text = f"{warning}{self._screen.url} {reason}.{last}{retry}"
        for line in self._wrapped(Text(text)):
            line.pad_right(self._width - line.cell_len)
            line.stylize(f"bold white on {colors.FAILED}")
            yield line
        if self._screen.is_silent and not is_old:
            yield from [Text(), Text("There are three ways to see something here:")]
            yield from self._ways(EXPORTER_WAYS)

    def _ways(self, ways: Sequence[Way]) -> Iterator[Text]:
        """Yield lines to type, each with what it is for, below it where there is no room."""
        columns = max(len(line) for line, _ in ways)
        for line, use in ways:
            if INDENT + columns + max(len(use) for _, use in ways) <= self._width:
                yield Text.assemble("  ", (line.ljust(columns), "bold"), f"   {use}")
            else:
                yield from [Text.assemble("  ", (line, "bold")), Text(f"    {use}")]

    def rows(self, spare: int = 0) -> tuple[list[Callable[[], Text]], int]:
        """Return functions that draw the lines of each GPU and rank, and which one is selected.

        With `spare` lines, ranks have a second one with their history, and a third one.
        """
        rows: list[Callable[[], Text]] = []
        selected = count = 0
        ranks = sum(len(group.ranks) for group in self._groups)
        has_past = any(len(self._screen.history.of(key)) > 1 for key in keys(self._groups))
        for group in self._groups:
            rows.append(partial(self._gpu, group.gpu))
            rows += [partial(self._note, note) for note in group.gpu.notes]
            for rank in group.ranks:
                is_selected = count == self._position
                selected = len(rows) if is_selected else selected
                rows.append(partial(self._rank, group.gpu, rank, is_selected=is_selected))
                more = [partial(self._past, group.gpu, rank)] * has_past
                more += [partial(self._threat, rank)] * (ranks > 1)
                rows += more[: spare // ranks]
                count += 1
        if self._screen.node and not count:
            rows += [partial(Text.copy, line) for line in self._nothing()]
        return rows, selected

    def _note(self, note: GpuNote) -> Text:
        return Text.assemble("  ", (f"• {note.text}", colors.ATTENTION), f" {note.remedy}")

    def _past(self, gpu: GpuState, rank: RankState) -> Text:
        """Return what was seen of a rank as sparklines, on the scale of its GPU."""
        points = self._screen.history.of((gpu.uuid, rank.id))
        is_timed = self._width >= WIDE_COLUMNS
        room = (self._width - INDENT - PAST_COLUMNS - DURATION_COLUMNS * is_timed) // 2
        line = Text(" " * INDENT, style="dim")
        if len(points) < 2 or room < 4:
            return line
        columns = {
            "reserved": [point.reserved_bytes for point in points],
            "headroom": [point.headroom_bytes for point in points],
        }
        for name, column in columns.items():
            known = [size for size in column if size is not None]
            if known:
                drawn = sparkline(known, min(room, MAX_SPARKS), gpu.total_bytes or 0)
                line.append(f"{name} {drawn} {gib(known[0])} → {gib(known[-1])}   ")
        duration = format_seconds(points[-1].time - points[0].time)
        return line.append(f"in {duration}") if is_timed else line

    def _threat(self, rank: RankState) -> Text:
        texts = [why.text for why in rank.why[:1]]
        return Text.assemble(" " * INDENT, *((f"• {text}", colors.ATTENTION) for text in texts))

    def _nothing(self) -> Iterator[Text]:
        wanted = self._screen.view.filter
        if wanted:
            yield Text(f"  No run has {wanted!r} in its name: Esc shows all.", style="dim")
            return
        yield Text()
        yield Text("No ranks yet. There are three ways to start one:")
        yield from self._ways(RANK_WAYS)

    def _gpu(self, gpu: GpuState) -> Text:
        if gpu is WAITING:
            return Text("Ranks that have not used a GPU yet", style="bold")
        line = Text.assemble((_cut(_gpu_name(gpu), 6) + " ", "bold"))
        has_sensors = self._width >= MIN_SENSOR_WIDTH
        taken = 7 + FREE_COLUMNS + SENSOR_COLUMNS * has_sensors
        if self._is_wide:
            line.append(_cut(gpu.name or "", NAME_COLUMNS) + " ")
            taken += NAME_COLUMNS + 1
        line.append_text(self._looks.bar(gpu.parts, gpu.total_bytes, max(8, self._width - taken)))
        if not gpu.up:
            return line.append("  does not respond", style=f"bold {colors.FAILED}")
        free = next((part.bytes for part in gpu.parts if part.name == "free"), None)
        sizes = f"{gib(free)} of {gib(gpu.total_bytes)} free"
        line.append(sizes.rjust(FREE_COLUMNS))
        return line.append(_sensors(gpu), style="dim") if has_sensors else line

    def _rank(self, gpu: GpuState, rank: RankState, *, is_selected: bool) -> Text:
        ooms = None if rank.ooms is None else sum(rank.ooms.values())
        headroom = rank.headroom_flush_bytes
        severity = f"bold {colors.FAILED}" if rank.has_severe_fragmentation else ""
        cells = {
            "rank": (_count(rank.rank), "bold" if is_selected else ""),
            "run": (rank.run, "bold" if is_selected else ""),
            "pid": (_count(rank.pid), "dim"),
            "state": (rank.state, colors.STATES.get(rank.state, "")),
            "tensors": (gib(rank.tensor_bytes), ""),
            "reserved": (gib(rank.reserved_bytes), ""),
            "headroom": (gib(headroom), ""),
            "FI": (ratio(rank.fragmentation_ratio), severity),
            "retries": (_count(rank.alloc_retries), colors.ATTENTION if rank.alloc_retries else ""),
            "OOMs": (_count(ooms), f"bold {colors.FAILED}" if ooms else ""),
        }
        line = self._line("▶ " if is_selected else "  ", cells)
        if self._is_wide:
            width = self._width - line.cell_len - 2
            line.append("  ").append_text(self._looks.bar(rank.parts, gpu.total_bytes, width))
        return line

    def _line(self, mark: str, cells: Mapping[str, tuple[str, str]]) -> Text:
        line = Text(mark)
        for column in self._columns:
            value, style = cells[column.name]
            line.append(_cell(value, column.width or -self._run_columns) + " ", style=style)
        line.rstrip()
        return line

    def _selected(self) -> tuple[GpuState, RankState] | None:
        shown = [(group.gpu, rank) for group in self._groups for rank in group.ranks]
        return shown[self._position] if shown else None

    def detail(self) -> list[Text]:
        """Return what the selected rank is, its parts, its GPU's other parts, and why."""
        selected = self._selected()
        if selected is None:
            return [Text(), *self.all_parts()]
        gpu, rank = selected
        title = Text(" · ".join(_facts(gpu, rank, self._node.time)), style="bold")
        own = {part.name for part in rank.parts}
        others = [part for part in gpu.parts if part.name not in own]
        return [
            Text("─" * self._width, style="dim"),
            *self._wrapped(title),
            *self._why(rank),
            *self._verdict(gpu, rank),
            *self._parts("holds" if is_live(rank) else "held", rank.parts),
            *self._parts("GPU", others),
        ]

    def whole_run(self) -> list[Text]:
        """Return the selected rank's memory over its whole run, as far as it is known."""
        selected = self._selected()
        answer = self._answer(*selected) if selected else None
        return self._texts(whole_run(answer)) if answer else []

    def all_parts(self) -> list[Text]:
        """Return the parts that any bar has, which explains the bars."""
        bars = [
            bar for gpu in self._node.gpus for bar in (gpu.parts, *(r.parts for r in gpu.ranks))
        ]
        present = {part.name for parts in bars for part in parts}
        names = [name for name in self._looks.names if name in present]
        return self._parts("bars", [PartBytes(name, 0) for name in names], has_sizes=False)

    def whys(self) -> list[Text]:
        """Return what there is to know about each GPU and rank."""
        notes = [
            self._wrapped(Text.assemble((f"• {_gpu_name(gpu)}: ", colors.ATTENTION), words))
            for gpu in (group.gpu for group in self._groups)
            for words in (f"{note.text} {note.remedy}" for note in gpu.notes)
        ]
        ranks = [
            line
            for group in self._groups
            for rank in group.ranks
            for line in (
                *self._why(rank, f"rank {_count(rank.rank)} of {rank.run}: "),
                *self._verdict(group.gpu, rank),
            )
        ]
        return [*chain.from_iterable(notes), *ranks]

    def _verdict(self, gpu: GpuState, rank: RankState) -> list[Text]:
        answer = self._answer(gpu, rank)
        lines = verdict_lines(rank, answer, self._width) if answer else ()
        return [piece for line in lines for piece in self._wrapped(Text(line, style="bold"))]

    def ages(self) -> list[Text]:
        """Return the largest age of the ranks' numbers."""
        ranks = [rank for group in self._groups for rank in group.ranks if is_live(rank)]
        stats, snapshots = (
            min((known for known in times if known is not None), default=None)
            for times in ((r.stats_time for r in ranks), (r.snapshot_time for r in ranks))
        )
        now = self._node.time
        if now is None or stats is None or snapshots is None:
            return []
        text = (
            f"Sizes were read at most {_age(stats, now)} ago, and the snapshots behind FI and "
            f"stranded bytes were taken at most {_age(snapshots, now)} ago."
        )
        return self._wrapped(Text(text, style="dim"))

    def _why(self, rank: RankState, subject: str = "") -> list[Text]:
        texts = [why.text for why in rank.why]
        return [
            line
            for text in texts
            for line in self._wrapped(Text.assemble((f"• {subject}", colors.ATTENTION), text))
        ]

    def _parts(
        self, name: str, parts: Sequence[PartBytes], *, has_sizes: bool = True
    ) -> list[Text]:
        """Return lines of swatches, names and sizes; a part is never split between lines."""
        lines = [Text.assemble((f"{name:5} ", "dim"))] if parts else []
        for part in parts:
            entry = self._looks.swatch(part.name).append(
                f" {part.label or self._looks.of(part.name).label}"
            )
            if has_sizes:
                entry.append(f" {gib(part.bytes)}")
            if lines[-1].cell_len > 6 and lines[-1].cell_len + entry.cell_len > self._width:
                lines.append(Text(" " * 6))
            lines[-1].append_text(entry).append("  ")
        return lines

    def footer(self, start: int, count: int, room: int) -> Text:
        """Return the keys, and how much of the list is out of sight."""
        view = self._screen.view
        if view.is_typing:
            return Text.assemble(("filter by run: ", "bold"), view.filter, ("▏", "blink"))
        filter_ = f"/ filter: {view.filter} (Esc: all)" if view.filter else "/ filter"
        hints = ["? help", "q quit", "Enter report", f"s order: {view.order}", filter_, "↑↓ select"]
        if view.is_help or view.is_open:
            hints = ["Esc back", "q quit", "↑↓ scroll", *["? help"] * (not view.is_help)]
        if self._screen.node is None:
            hints = ["? help", "q quit"]
        status = f"{self._screen.status}   " if self._screen.status else ""
        hidden = f"lines {start + 1}–{min(count, start + room)} of {count}   " * (count > room)
        taken = cell_len(status) + cell_len(hidden)
        while len(hints) > 1 and taken + cell_len("   ".join(hints)) > self._width:
            hints.pop()
        return Text.assemble((status + hidden, "bold"), ("   ".join(hints), "dim"))

    def _wrapped(self, text: Text) -> list[Text]:
        return list(text.wrap(self._console, self._width))


def _start(selected: int, count: int, room: int) -> int:
    """Return the first line in sight, so that the selected one is near the middle."""
    return max(0, min(selected - room // 2, count - room))


def _facts(gpu: GpuState, rank: RankState, now: float | None) -> Iterator[str]:
    of = f" of {rank.world_size}" if rank.world_size else ""
    yield f"rank {_count(rank.rank)}{of}"
    yield rank.run
    if rank.launch:
        yield f"launch {rank.launch}"
    if rank.script:
        yield rank.script
    yield rank.state
    if gpu.name:
        yield gpu.name
    if rank.steps:
        mean = "" if rank.step_seconds is None else f" of {rank.step_seconds:.2f} s"
        yield f"{counted(rank.steps, 'step')}{mean}"
    if rank.fragmentation_ratio is not None:
        yield f"fragmentation index (FI) {ratio(rank.fragmentation_ratio)}"
    if now is not None and rank.sample_time is not None:
        yield f"seen {_age(rank.sample_time, now)} ago"
    if now is not None and rank.snapshot_time is not None:
        yield f"snapshot {_age(rank.snapshot_time, now)} ago"


def _gpu_name(gpu: GpuState) -> str:
    return "GPU –" if gpu.index is None else f"GPU {gpu.index}"


def _clock(timestamp: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(timestamp))


def _age(timestamp: float, now: float) -> str:
    return format_seconds(max(0.0, now - timestamp))


def _sensors(gpu: GpuState) -> str:
    temperature, power, use = gpu.temperature_celsius, gpu.power_watts, gpu.utilization_ratio
    texts = (
        "" if temperature is None else f"{temperature:.0f}°C",
        "" if power is None else f"{power:.0f}W",
        "" if use is None else f"{use:.0%}",
    )
    return "".join(text.rjust(5) for text in texts)


def _cell(value: str, width: int) -> str:
    """Return the value in a column: to the right if `width` is positive, else to the left."""
    columns = abs(width)
    if cell_len(value) > columns:
        return _cut(value, columns)
    padding = " " * (columns - cell_len(value))
    return padding + value if width > 0 else value + padding


def _cut(text: str, columns: int) -> str:
    if cell_len(text) <= columns:
        return set_cell_size(text, columns)
    return set_cell_size(text, columns - 1) + "…"


def _fitted(line: Text, width: int) -> Text:
    line.rstrip()
    line.truncate(width, overflow="ellipsis")
    return line


def _count(value: int | None) -> str:
    return "–" if value is None else str(value)


def ratio(value: float | None) -> str:
    """Return a fragmentation index in two digits."""
    return "–" if value is None else format_index(value)
