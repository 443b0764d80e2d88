"""The report of a fleet: what was lost and wasted, what ended runs, what would fit elsewhere."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchmem.fleet.launches import Launch, Outcome, launches
from torchmem.fleet.reading import Key, Past, Prices
from torchmem.phantom.gpus import CATALOG
from torchmem.sample.remedy_words import REMEDY_WORDS

MIN_FREE = 0.1
"""The share of a GPU that a run leaves free at its peak, where the report says that it fits."""
MIN_STEPS = 10
"""A run with fewer steps may not have reached its peak."""
MIN_BATCH_FACTOR = 1.25
"""A larger batch is mentioned from this factor on."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """GPU-hours, or what they cost.

    `used`: held by ranks. `lost`: waiting for a rank that ran out of memory, and starting again
    after it. `stranded`: memory between tensors that no request fits into. `idle`: memory held on
    a GPU that ran no kernel. `empty`: given by the kubelet or Slurm, and without a process.
    """

    used: float
    lost: float
    stranded: float
    idle: float
    empty: float

    @property
    def wasted(self) -> float:
        """What it cost for nothing. Lost time of a rank can also be idle, so this is the sum."""
        return self.lost + self.stranded + self.idle + self.empty


@dataclass(frozen=True, slots=True)
class Bill(Amounts):
    """GPU-hours of a run, a user, a team or a namespace; the names are "" where unknown.

    `cost` is what the hours with a price cost, in the report's currency; None if none has one.
    """

    run: str = ""
    user: str = ""
    team: str = ""
    namespace: str = ""
    cost: Amounts | None = None


@dataclass(frozen=True, slots=True)
class WholeCost:
    """What all GPUs with a price cost in `currency`, and what of that has no owner."""

    currency: str
    all_gpus: float
    idle_unattributed: float
    stranded_unattributed: float


@dataclass(frozen=True, slots=True)
class Ending:
    """How a launch of a run ended.

    `start` and `end` are Unix seconds; `gpu_hours` is what its ranks had run, within the time of
    the report and before the OOM. `cause`, `onset` and `remedy` are those of the OOM.
    `back_seconds` is how long it took until the run was started again; None if it was not, or is
    not known.
    """

    run: str
    user: str
    team: str
    start: float
    end: float
    outcome: Outcome
    ranks: int
    gpu_hours: float
    cause: str | None = None
    onset: str | None = None
    remedy: str | None = None
    kill_cause: str | None = None
    back_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Saving:
    """What would have saved some launches: the remedy, how many, their GPU-hours, and the runs."""

    remedy: str
    launches: int
    gpu_hours: float
    runs: Sequence[str]


@dataclass(frozen=True, slots=True)
class Fit:
    """A run that needs less than its GPUs have.

    `need_bytes`: the most that one of its ranks needed, beside the cache. `gpu`: the product with
    the least memory in which that leaves MIN_FREE free, if it is smaller. `batch_factor`: by how
    much the batch could grow in the GPU that it has; None if unknown.
    """

    run: str
    user: str
    team: str
    gpu_hours: float
    need_bytes: float
    total_bytes: float
    gpu: str | None
    gpu_bytes: int | None
    batch_factor: float | None


@dataclass(frozen=True, slots=True)
class FleetReport:
    """Everything that the report says about the time from `start` to `end`, in Unix seconds.

    GPU-hours without an owner: `all_gpus` that were there, `idle_unattributed` and
    `stranded_unattributed`. `cost` is None without prices, and with prices in several currencies.
    """

    start: int
    end: int
    total: Bill
    all_gpus: float
    idle_unattributed: float
    stranded_unattributed: float
    cost: WholeCost | None
    by_run: Sequence[Bill]
    by_user: Sequence[Bill]
    by_team: Sequence[Bill]
    by_namespace: Sequence[Bill]
    endings: Sequence[Ending]
    savings: Sequence[Saving]
    fits: Sequence[Fit]
    notes: Sequence[str]

    def outcomes(self) -> Mapping[Outcome, int]:
        """Return how many launches ended in each way."""
        return Counter(ending.outcome for ending in self.endings)

    def ooms(self) -> Mapping[tuple[str, str], int]:
        """Return how many launches an OOM ended, by cause and onset ("" if unknown)."""
        ended = (ending for ending in self.endings if ending.outcome == "oom")
        return Counter((ending.cause or "", ending.onset or "") for ending in ended)


def report(past: Past) -> FleetReport:
    """Return the report of a past."""
    by_run = _bills(past, lambda key: _Owner(key[1], *key[3:6]))
    endings = list(_endings(past, _owners(past)))
    (total,) = _bills(past, lambda _: _Owner()) or [Bill(0.0, 0.0, 0.0, 0.0, 0.0)]
    stranded = past.all_wasted - past.all_idle
    return FleetReport(
        past.window.start,
        past.window.end,
        total,
        past.all_gpus,
        _rest(past.all_idle, total.idle),
        _rest(stranded, total.stranded),
        _whole_cost(past.prices, total.cost or Amounts(0.0, 0.0, 0.0, 0.0, 0.0)),
        by_run,
        _bills(past, lambda key: _Owner(user=key[3])),
        _bills(past, lambda key: _Owner(team=key[4])),
        _bills(past, lambda key: _Owner(namespace=key[5])),
        endings,
        _savings(endings),
        _fits(past, by_run, endings),
        list(_notes(past)),
    )


def _rest(whole: float, known: float) -> float:
    """Return what is left of a sum; what is less than its rounding is nothing."""
    rest = whole - known
    return rest if rest > 1e-6 * max(1.0, whole) else 0.0


def _whole_cost(prices: Prices, known: Amounts) -> WholeCost | None:
    if prices.currency is None:
        return None
    idle, wasted = prices.cost(prices.idle), prices.cost(prices.wasted)
    return WholeCost(
        prices.currency,
        prices.cost(prices.gpus),
        _rest(idle, known.idle),
        _rest(wasted - idle, known.stranded),
    )


class _Owner(NamedTuple):
    run: str = ""
    user: str = ""
    team: str = ""
    namespace: str = ""


def _bills(past: Past, group: Callable[[Key], _Owner]) -> list[Bill]:
    """Return the bills of groups of OWNER, the most wasteful one first."""
    kinds = (past.used, past.lost, past.stranded, past.idle, past.empty)
    sums: dict[_Owner, list[float]] = defaultdict(lambda: [0.0] * len(kinds))
    costs: dict[_Owner, list[float]] = defaultdict(lambda: [0.0] * len(kinds))
    for number, each in enumerate(kinds):
        for key, hours in each.by_owner.items():
            sums[group(key)][number] += hours
            price = past.prices.of(key)
            if price is not None:
                costs[group(key)][number] += price * hours
    bills = [_bill(owner, hours, costs.get(owner)) for owner, hours in sums.items() if any(hours)]
    return sorted(bills, key=lambda bill: (-bill.wasted, -bill.used, bill.run, bill.user))


def _bill(owner: _Owner, hours: Sequence[float], costs: Sequence[float] | None) -> Bill:
    used, lost, stranded, idle, empty = hours
    cost = Amounts(*costs) if costs else None
    return Bill(used, lost, stranded, idle, empty, *owner, cost=cost)


def _owners(past: Past) -> Mapping[Key, Key]:
    """Return user and team of each launch, by job, run and launch: those of most GPU-hours."""
    # Ascending: of several owners of a launch, the last one stays in the result.
    hours = sorted(past.used.by_owner.items(), key=lambda item: item[1])
    return {key[:3]: key[3:5] for key, _ in hours}


def _endings(past: Past, owners: Mapping[Key, Key]) -> Iterator[Ending]:
    """Yield how each launch ended; the newest end comes first."""
    found = []
    for of_run in launches(past.processes):
        following: list[Launch | None] = [*of_run[1:], None]
        for launch, after in zip(of_run, following, strict=True):
            found.append(_ending(past, launch, after, owners))
    yield from sorted(found, key=lambda ending: -ending.end)


def _ending(past: Past, launch: Launch, after: Launch | None, owners: Mapping[Key, Key]) -> Ending:
    first, oom = launch.processes[0], launch.oom
    user, team = owners.get(first.key, ("", ""))
    killed = (process.kill_cause for process in launch.processes if process.kill_cause)
    return Ending(
        first.run,
        user,
        team,
        launch.start,
        launch.end,
        launch.outcome(past.window.end),
        len({process.rank for process in launch.processes}),
        launch.gpu_hours(past.window.start),
        oom.cause if oom else None,
        oom.onset if oom else None,
        oom.remedy if oom else None,
        next(killed, None),
        max(0.0, after.start - launch.end) if after else None,
    )


def _savings(endings: Sequence[Ending]) -> list[Saving]:
    groups: dict[str, list[Ending]] = defaultdict(list)
    for ending in endings:
        remedy = saved_by(ending)
        if remedy:
            groups[remedy].append(ending)
    savings = [
        Saving(
            remedy,
            len(group),
            sum(ending.gpu_hours for ending in group),
            sorted({ending.run for ending in group}),
        )
        for remedy, group in groups.items()
    ]
    return sorted(savings, key=lambda saving: (-saving.gpu_hours, -saving.launches))


def saved_by(ending: Ending) -> str | None:
    """Return what would have saved a launch, in one line; None if the report cannot know.

    After an OOM, it is the first advice of the rank's own report.
    """
    return REMEDY_WORDS["host_memory"] if ending.outcome == "host_memory" else ending.remedy


def _fits(past: Past, bills: Sequence[Bill], endings: Sequence[Ending]) -> list[Fit]:
    """Return runs with room, those that use most GPU-hours first; none that ran out of memory."""
    owners = _owners(past)

    def of_owner(launch: Key) -> Key:
        return launch[1], *owners.get(launch, ("", ""))

    out = {(end.run, end.user, end.team) for end in endings if end.outcome == "oom"}
    stepped = {of_owner(it.key) for it in past.processes if (it.steps or 0) >= MIN_STEPS}
    need, step = (_worst(each, of_owner, max) for each in (past.need, past.step_peak))
    totals = _worst(past.device_total, of_owner, min)
    found = [
        _fit(bill, need[key], totals[key], step.get(key))
        for bill in bills
        if (key := (bill.run, bill.user, bill.team)) in stepped - out
        and key in need.keys() & totals
    ]
    fitting = (fit for fit in found if fit.gpu or fit.batch_factor)
    return sorted(fitting, key=lambda fit: (-fit.gpu_hours, fit.run))


def _worst(
    values: Mapping[Key, float],
    of_owner: Callable[[Key], Key],
    merge: Callable[[float, float], float],
) -> dict[Key, float]:
    """Return one value for all launches of a run, user and team."""
    found: dict[Key, float] = {}
    for key, value in values.items():
        owner = of_owner(key)
        found[owner] = merge(found.get(owner, value), value)
    return found


def _fit(bill: Bill, need: float, total: float, step: float | None) -> Fit:
    usable = 1 - MIN_FREE
    smaller = [
        gpu
        for gpu in CATALOG
        if need <= usable * gpu.memory_bytes and gpu.memory_bytes < usable * total
    ]
    gpu = min(smaller, key=lambda gpu: gpu.memory_bytes, default=None)
    factor = 1 + (usable * total - need) / step if step else None
    return Fit(
        bill.run,
        bill.user,
        bill.team,
        bill.used,
        need,
        total,
        gpu.product if gpu else None,
        gpu.memory_bytes if gpu else None,
        factor if factor and factor >= MIN_BATCH_FACTOR else None,
    )


def _notes(past: Past) -> Iterator[str]:
    if past.is_partial:
        yield "The store said that its answers are partial, so these numbers are too low."
    if len(past.prices.currencies) > 1:
        listed = ", ".join(sorted(past.prices.currencies))
        yield f"Prices are in several currencies ({listed}): choose one with --match."
    elif past.prices.currency is not None:
        held = past.used.by_owner
        unpriced = sum(hours for key, hours in held.items() if past.prices.of(key) is None)
        if unpriced:
            yield f"{unpriced:,.1f} of the held GPU-hours have no price."
    known = [window for window, value in past.used.by_window.items() if value]
    if known and min(window.start for window in known) > past.window.start:
        first = time.strftime("%Y-%m-%d", time.gmtime(min(window.start for window in known)))
        yield f"The store has no ranks before {first}."
