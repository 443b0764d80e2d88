"""Read the past of a fleet from a store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torchmem.explain.oom_report import MAX_TIMESTAMP
from torchmem.fleet import series
from torchmem.fleet.launches import OomEnd, RunProcess
from torchmem.fleet.store import Query, Store, Window
from torchmem.sample.errors import UsageError

Labels = Mapping[str, str]
Key = tuple[str, ...]

LAUNCH = ("job", "run", "launch")
OWNER = (*LAUNCH, "user", "team", "namespace", "model")
MODEL = ("job", "model")
PROCESS = ("job", "instance", "rank", "pid", "run", "launch")
CLUSTER = ("job",)

Progress = Callable[[str, int, int], None]
"""Is called with what is read, how many queries are done, and how many there are."""


@dataclass(frozen=True, slots=True)
class Hours:
    """GPU-hours by OWNER or by other labels, in all and by window."""

    by_owner: Mapping[Key, float]
    by_window: Mapping[Window, float]

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.by_owner.values())


@dataclass(frozen=True, slots=True)
class Prices:
    """The newest prices of a GPU-hour by job and model, and the GPU-hours to which they apply.

    `currencies` of all prices. `gpus`, `idle` and `wasted`: those of all GPUs with a price, by job
    and model. Of an owner's GPU-hours, those with a model have a price.
    """

    by_model: Mapping[Key, float] = field(default_factory=dict)
    currencies: frozenset[str] = frozenset()
    gpus: Mapping[Key, float] = field(default_factory=dict)
    idle: Mapping[Key, float] = field(default_factory=dict)
    wasted: Mapping[Key, float] = field(default_factory=dict)

    @property
    def currency(self) -> str | None:
        """The currency of all sums; None without prices, and with prices in several currencies."""
        return next(iter(self.currencies)) if len(self.currencies) == 1 else None

    def of(self, key: Key) -> float | None:
        """Return the price for a key that begins with the job and ends with the model."""
        return self.by_model.get((key[0], key[-1])) if self.currency else None

    def cost(self, hours: Mapping[Key, float]) -> float:
        """Return what GPU-hours cost, of those that have a price."""
        return sum((self.of(key) or 0.0) * each for key, each in hours.items())


@dataclass(frozen=True, slots=True)
class Past:
    """What the store knows about a fleet in a time.

    GPU-hours: `used` by ranks, `lost` to restarts after OOMs, `stranded`, `idle` while their memory
    was held, `empty` while assigned without a process; `all_gpus`, `all_idle` and `all_wasted` with
    what belongs to no run or user. `need`, `step_peak` and `device_total` are bytes of one GPU by
    job, run and launch.
    """

    window: Window
    processes: list[RunProcess]
    used: Hours
    lost: Hours
    stranded: Hours
    idle: Hours
    empty: Hours
    all_gpus: float
    all_idle: float
    all_wasted: float
    need: Mapping[Key, float]
    step_peak: Mapping[Key, float]
    device_total: Mapping[Key, float]
    prices: Prices = field(default_factory=Prices)
    is_partial: bool = False


def _none(*_: object) -> None:
    """Show no progress."""


@dataclass(slots=True)
class StoreReader:
    """Reads a past from a store; `matchers` restrict the series, as in `cluster="a"`."""

    store: Store
    window: Window
    matchers: str = ""
    progress: Progress = _none
    _done: int = field(default=0, init=False)

    def past(self) -> Past:
        """Return everything that the report needs. Raise UsageError."""
        used = self._hours(series.GPUS)
        processes = self._processes()
        if processes and not used.by_owner:
            raise UsageError(
                f"the store has ranks, but not {series.GPUS}: load the recording rules of this "
                "version (`torchmem manifests rules`); the report covers the time since then."
            )
        return Past(
            self.window,
            processes,
            used,
            self._hours(series.LOST),
            self._hours(series.STRANDED),
            self._hours(series.IDLE),
            self._hours(series.EMPTY),
            self._hours(series.ALL_GPUS, CLUSTER).total,
            self._hours(series.ALL_IDLE, CLUSTER).total,
            self._hours(series.ALL_WASTED, CLUSTER).total,
            self._merged(LAUNCH, series.over("max", self._select(series.NEED)), max),
            self._merged(LAUNCH, series.over("max", self._select(series.STEP_PEAK)), max),
            self._merged(LAUNCH, series.over("min", self._select(series.DEVICE_TOTAL)), min),
            self._prices(),
            self.store.is_partial,
        )

    def _prices(self) -> Prices:
        newest = self._merged(
            (*MODEL, "currency"),
            series.over("last", self._select(series.PRICE)),
            lambda _, later: later,
        )
        return Prices(
            {key[:2]: price for key, price in newest.items()},
            frozenset(key[2] for key in newest),
            *(
                self._hours(name, MODEL).by_owner
                for name in (series.PRICED_GPUS, series.PRICED_IDLE, series.PRICED_WASTED)
            ),
        )

    def _select(self, name: str) -> str:
        return f"{name}{{{self.matchers}}}"

    def _hours(self, name: str, labels: Key = OWNER) -> Hours:
        """Return GPU-hours; series that differ in other labels only are added up."""
        by_owner, by_window = defaultdict[Key, float](float), dict[Window, float]()
        for window, rows in self._over(series.hours(self._select(name))):
            for found, value in rows:
                by_owner[_key(found, labels)] += value
            by_window[window] = sum(value for _, value in rows)
        return Hours(by_owner, by_window)

    def _merged(
        self, labels: Key, query: Query, merge: Callable[[float, float], float]
    ) -> dict[Key, float]:
        merged: dict[Key, float] = {}
        for _, rows in self._over(query):
            for found, value in rows:
                key = _key(found, labels)
                merged[key] = merge(merged.get(key, value), value)
        return merged

    def _newest(self, name: str, equals: str = "") -> dict[Key, tuple[Labels, float]]:
        """Return labels and value of the newest series of each process."""
        found: dict[Key, tuple[Labels, float]] = {}
        for _, rows in self._over(series.over("last", self._select(name), equals)):
            # Of two series of a process, the one with more labels knows more, such as an onset.
            rows.sort(key=lambda row: len(row[0]))
            found |= {_key(row[0], PROCESS): row for row in rows}
        return found

    def _times(self, name: str) -> dict[Key, tuple[Labels, float]]:
        """Return the newest series whose values can be times, in Unix seconds."""
        newest = self._newest(name).items()
        return {key: row for key, row in newest if 0 <= row[1] <= MAX_TIMESTAMP}

    def _processes(self) -> list[RunProcess]:
        states = self._newest(series.STATE, " == 1")
        seen, started = self._times(series.SEEN), self._times(series.START)
        steps, ooms = self._newest(series.STEPS), self._newest(series.OOM_END)
        killed = self._newest(series.KILL_CAUSE, " == 1")

        def process(key: Key, state: str) -> RunProcess:
            last = seen[key][1]
            kill = killed.get(key)
            return RunProcess(
                job=key[0],
                run=key[4],
                launch=key[5],
                rank=key[2],
                start=started[key][1] if key in started else last,
                seen=last,
                state=state,
                steps=steps[key][1] if key in steps else None,
                kill_cause=kill[0].get("cause") if kill else None,
                oom=_oom(*ooms[key]) if key in ooms else None,
            )

        return [
            process(key, labels.get("state", ""))
            for key, (labels, _) in states.items()
            if key in seen
        ]

    def _over(self, query: Query) -> list[tuple[Window, list[tuple[Labels, float]]]]:
        answers = []
        for window, rows in self.store.over(self.window, query):
            answers.append((window, rows))
            self.progress(
                "asking the store", self._done + window.end - self.window.start, self._all
            )
        self._done += self.window.seconds
        return answers

    @property
    def _all(self) -> int:
        """The seconds of all queries together."""
        return QUERIES * self.window.seconds


QUERIES = 20
"""How many times `StoreReader.past` asks about the whole time."""


def _oom(labels: Labels, timestamp: float) -> OomEnd:
    onset, remedy = (labels.get(name) or None for name in ("onset", "remedy"))
    return OomEnd(timestamp, labels.get("cause", ""), onset, remedy)


def _key(labels: Labels, names: Key) -> Key:
    return tuple(labels.get(name, "") for name in names)
