"""The screen of `torchmem top`: GPUs as bars, their ranks, and the selected rank in detail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from torchmem.allocator.sizes import format_index
from torchmem.cli.terminal import counted
from torchmem.explain.oom_report import format_seconds
from torchmem.metrics import colors
from torchmem.top.bars import UseStyles, gib
from torchmem.top.node import Gpu, Node, Rank, Use
from torchmem.top.view import WAITING, View, is_live

MIN_BODY_LINES = 6
WIDE_COLUMNS = 120
"""From this width on, GPUs have their names, and each rank has its own bar."""
NAME_COLUMNS = 22
FREE_COLUMNS = 19
SENSOR_COLUMNS = 15
MIN_RUN_COLUMNS, MAX_RUN_COLUMNS = 10, 40
# Name and width, negative for text, which is left-aligned; the run has what is left.
COLUMNS = (
    ("rank", 4),
    ("run", 0),
    ("pid", 7),
    ("state", -7),
    ("tensors", 7),
    ("reserved", 8),
    ("headroom", 8),
    ("FI", 4),
    ("retries", 7),
    ("OOMs", 4),
)
FIXED_COLUMNS = 1 + sum(abs(width) + 1 for _, width in COLUMNS)


@dataclass(frozen=True, slots=True)
class Screen:
    """What to draw. `away`: why the exporter has not answered for `away_seconds`.

    `status` is shown before the keys.
    """

    node: Node | None
    url: str
    view: View = field(default_factory=View)
    away: str | None = None
    away_seconds: int = 0
    status: str | None = None


def drawn(screen: Screen, console: Console) -> Text:
    """Return the screen in exactly the size of the console; the selected rank is in sight."""
    width, height = console.width, console.height
    painter = _Painter(screen, console)
    top = [*painter.header(), *painter.problems()]
    rows, selected = painter.rows()
    count = len(rows)
    room = height - len(top) - 1
    bottom = painter.detail()
    bottom = bottom[: max(0, room - min(count, MIN_BODY_LINES))]
    room -= len(bottom)
    start = _start(selected, count, room)
    body = [draw() for draw in rows[start : start + room]]
    body += [Text()] * (room - len(body))
    lines = [*top, *body, *bottom, painter.footer(start, count, room)][:height]
    return Text("\n").join(_fitted(line, width) for line in lines)


def page(screen: Screen, console: Console) -> Text:
    """Return all GPUs and ranks, and what there is to know about each rank, for `--once`."""
    painter = _Painter(screen, console, has_cursor=False)
    rows, _ = painter.rows()
    body = (draw() for draw in rows)
    lines = [*painter.header(), *painter.problems(), *body, *painter.all_parts(), *painter.whys()]
    lines += painter.ages()
    return Text("\n").join([*(_fitted(line, console.width) for line in lines), Text()])


class _Painter:
    """The lines of one screen."""

    def __init__(self, screen: Screen, console: Console, *, has_cursor: bool = True) -> None:
        self._screen, self._console, self._width = screen, console, console.width
        self._node = screen.node or Node()
        self._groups = screen.view.groups(self._node)
        self._position = screen.view.position(self._groups) if has_cursor else -1
        legend = [(entry.name, entry.label, entry.color) for entry in self._node.legend]
        has_colors = console.color_system is not None and not console.no_color
        self._looks = UseStyles(legend, has_colors=has_colors)
        self._is_wide = self._width >= WIDE_COLUMNS
        run = self._width - FIXED_COLUMNS
        self._run_columns = max(MIN_RUN_COLUMNS, min(MAX_RUN_COLUMNS, run // (1 + self._is_wide)))

    def header(self) -> Iterator[Text]:
        """Yield the node with its counts, and the names of the columns."""
        ranks = [rank for gpu in self._node.gpus for rank in gpu.ranks] + [*self._node.waiting]
        counts = [counted(len(self._node.gpus), "GPU"), counted(len(ranks), "rank")]
        left = Text.assemble(("torchmem top", "bold"), "  ", (self._node.node, "bold cyan"))
        if self._screen.node:
            left.append("  " + ", ".join(counts) + "  sizes in GiB", style="dim")
        gap = self._width - left.cell_len - cell_len(self._screen.url)
        if gap > 1:
            left.append(" " * gap).append(self._screen.url, style="dim")
        yield left
        if self._screen.node:
            yield self._line("  ", [(name, "dim") for name, _ in COLUMNS])

    def problems(self) -> Iterator[Text]:
        """Yield why the screen is incomplete or out of date."""
        if self._screen.away:
            since = f" Retrying for {self._screen.away_seconds} s."
            text = f"{self._screen.url} {self._screen.away}.{since}"
            yield from self._wrapped(Text(text, style=f"bold {colors.FAILED}"))
        elif not self._screen.node:
            yield Text(f"Asking {self._screen.url} …", style="dim")
        if not self._node.nvml.up:
            nvml = self._node.nvml
            reason = nvml.text or nvml.reason or "the reason is unknown"
            yield from self._wrapped(Text(f"NVML does not respond: {reason}", colors.ATTENTION))

    def rows(self) -> tuple[list[Callable[[], Text]], int]:
        """Return functions that draw the line of each GPU and rank, and which one is selected."""
        rows: list[Callable[[], Text]] = []
        selected = count = 0
        for group in self._groups:
            rows.append(partial(self._gpu, group.gpu))
            for rank in group.ranks:
                is_selected = count == self._position
                selected = len(rows) if is_selected else selected
                rows.append(partial(self._rank, group.gpu, rank, is_selected=is_selected))
                count += 1
        if self._screen.node and not count:
            rows.append(self._nothing)
        return rows, selected

    def _nothing(self) -> Text:
        wanted = self._screen.view.filter
        if wanted:
            return Text(f"  No run has {wanted!r} in its name: Esc shows all.", style="dim")
        return Text("  No ranks: start one with `torchmem run -- python train.py`.", style="dim")

    def _gpu(self, gpu: Gpu) -> Text:
        if gpu is WAITING:
            return Text("Ranks that have not used a GPU yet", style="bold")
        name = "GPU –" if gpu.index is None else f"GPU {gpu.index}"
        line = Text.assemble((_cut(name, 6) + " ", "bold"))
        taken = 7 + FREE_COLUMNS + SENSOR_COLUMNS
        if self._is_wide:
            line.append(_cut(gpu.name or "", NAME_COLUMNS) + " ")
            taken += NAME_COLUMNS + 1
        line.append_text(self._looks.bar(gpu.parts, gpu.total_bytes, max(8, self._width - taken)))
        if not gpu.up:
            return line.append("  does not respond", style=f"bold {colors.FAILED}")
        free = next((part.bytes for part in gpu.parts if part.name == "free"), None)
        sizes = f"{gib(free)} of {gib(gpu.total_bytes)} free"
        return line.append(sizes.rjust(FREE_COLUMNS)).append(_sensors(gpu), style="dim")

    def _rank(self, gpu: Gpu, rank: Rank, *, is_selected: bool) -> Text:
        ooms = None if rank.ooms is None else sum(rank.ooms.values())
        headroom = rank.headroom_flush_bytes
        severity = f"bold {colors.FAILED}" if rank.has_severe_fragmentation else ""
        cells = [
            (_count(rank.rank), "bold" if is_selected else ""),
            (rank.run, "bold" if is_selected else ""),
            (_count(rank.pid), "dim"),
            (rank.state, colors.STATES.get(rank.state, "")),
            (gib(rank.tensor_bytes), ""),
            (gib(rank.reserved_bytes), ""),
            (gib(headroom), ""),
            (ratio(rank.fragmentation_ratio), severity),
            (_count(rank.alloc_retries), colors.ATTENTION if rank.alloc_retries else ""),
            (_count(ooms), f"bold {colors.FAILED}" if ooms else ""),
        ]
        line = self._line("▶ " if is_selected else "  ", cells)
        if self._is_wide:
            width = self._width - line.cell_len - 2
            line.append("  ").append_text(self._looks.bar(rank.parts, gpu.total_bytes, width))
        return line

    def _line(self, mark: str, cells: Iterable[tuple[str, str]]) -> Text:
        line = Text(mark)
        for (name, columns), (value, style) in zip(COLUMNS, cells, strict=True):
            width = -self._run_columns if name == "run" else columns
            line.append(_cell(value, width) + " ", style=style)
        line.rstrip()
        return line

    def _selected(self) -> tuple[Gpu, Rank] | None:
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
            *self._parts("holds" if is_live(rank) else "held", rank.parts),
            *self._parts("GPU", others),
        ]

    def all_parts(self) -> list[Text]:
        """Return the parts that any bar has, which explains the bars."""
        bars = [
            bar for gpu in self._node.gpus for bar in (gpu.parts, *(r.parts for r in gpu.ranks))
        ]
        present = {part.name for parts in bars for part in parts}
        names = [name for name in self._looks.names if name in present]
        return self._parts("bars", [Use(name) for name in names], has_sizes=False)

    def whys(self) -> list[Text]:
        """Return what there is to know about each rank."""
        return [
            line
            for group in self._groups
            for rank in group.ranks
            for line in self._why(rank, f"rank {_count(rank.rank)} of {rank.run}: ")
        ]

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

    def _why(self, rank: Rank, subject: str = "") -> list[Text]:
        texts = [why.text for why in rank.why]
        return [
            line
            for text in texts
            for line in self._wrapped(Text.assemble((f"• {subject}", colors.ATTENTION), text))
        ]

    def _parts(self, name: str, parts: Sequence[Use], *, has_sizes: bool = True) -> list[Text]:
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
        text = f"↑↓ select   s order: {view.order}   {filter_}   q quit"
        status = f"{self._screen.status}   " if self._screen.status else ""
        line = Text.assemble((status, "bold"), (text, "dim"))
        if count > room:
            hidden = f"   lines {start + 1}–{min(count, start + room)} of {count}"
            line.append(hidden, style="bold")
        return line

    def _wrapped(self, text: Text) -> list[Text]:
        return list(text.wrap(self._console, self._width))


def _start(selected: int, count: int, room: int) -> int:
    """Return the first line in sight, so that the selected one is near the middle."""
    return max(0, min(selected - room // 2, count - room))


def _facts(gpu: Gpu, rank: Rank, now: float | None) -> Iterator[str]:
    of = f" of {rank.world_size}" if rank.world_size else ""
    yield f"rank {_count(rank.rank)}{of}"
    yield rank.run
    if rank.script:
        yield rank.script
    yield rank.state
    if gpu.name:
        yield gpu.name
    if rank.steps:
        mean = "" if rank.step_seconds is None else f" of {rank.step_seconds:.2f} s"
        yield f"{counted(rank.steps, 'step')}{mean}"
    if now is not None and rank.sample_time is not None:
        yield f"seen {_age(rank.sample_time, now)} ago"
    if now is not None and rank.snapshot_time is not None:
        yield f"snapshot {_age(rank.snapshot_time, now)} ago"


def _age(timestamp: float, now: float) -> str:
    return format_seconds(max(0.0, now - timestamp))


def _sensors(gpu: Gpu) -> str:
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
