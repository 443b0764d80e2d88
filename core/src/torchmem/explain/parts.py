"""What the memory of a rank and of a GPU consists of, as parts that add up to it exactly.

Reports, the live page, `torchmem top` and assistants all show these parts, in this order. They are
those of the dashboards (gpu:torchmem_memory_bytes:sum, recording-memory.yml), with the bytes of
tensors divided into components. Statistics, snapshots and NVML are read at slightly different
moments; the docstrings say which one decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torchmem.allocator.outside_memory import outside_bytes
from torchmem.metrics import colors
from torchmem.metrics.memory_parts import COMPONENTS, PARTS
from torchmem.sample.libraries import held_bytes
from torchmem.sample.sample import ASLEEP, PASSING, Allocator, ByPool, DeviceSample, Layout

MAX_GPU_BYTES = 1 << 50
"""More than any GPU has: a larger number in a sample cannot be true."""


class NamedBytes(Protocol):
    """A part by its name, in whichever record."""

    @property
    def name(self) -> str:
        """As in the legend."""

    @property
    def bytes(self) -> int:
        """Its size."""


@dataclass(frozen=True, slots=True)
class PartBytes:
    """A part's name, as in the legend, and its bytes. `label`: a name that the script gave."""

    name: str
    bytes: int
    label: str | None = None


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A part's name, its label on the page, its color as in colors.py, and its meaning.

    `group`: the one of GROUPS that it belongs to; empty for free memory.
    """

    name: str
    label: str = ""
    color: str = ""
    meaning: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class ChartArea:
    """Parts that are one area in charts. It has the color of the part of this name."""

    name: str
    label: str


GROUPS = (
    ChartArea("in_use", "tensors"),
    ChartArea("stranded", "stranded"),
    ChartArea("releasable", "releasable"),
    ChartArea("outside_allocator", "outside the allocator"),
    ChartArea("other_processes", "others"),
)
"""The groups of parts in charts over time, from below."""
_GROUP_OF = {
    "stranded": "stranded",
    "releasable": "releasable",
    "cached": "releasable",
    "private_pools": "releasable",
    "outside_allocator": "outside_allocator",
    "communicators": "outside_allocator",
    "rmm": "outside_allocator",
    "other_processes": "other_processes",
    "dead_processes": "other_processes",
    "not_pytorch": "other_processes",
    "driver": "other_processes",
    "free": "",
}


_ORDER = (
    "parameters",
    "gradients",
    "gradients_or_step",
    "optimizer_state",
    "other",
    "held",
    "step",
    "rounding",
    "in_use",
    "pending",
    "stranded",
    "releasable",
    "private_pools",
    "cached",
    "outside_allocator",
    "communicators",
    "rmm",
    "other_processes",
    "dead_processes",
    "not_pytorch",
    "driver",
    "free",
)
_SHOWN = {**PARTS, **COMPONENTS}
LEGEND = tuple(
    LegendEntry(
        name,
        _SHOWN[name].label,
        colors.legend_color(name),
        _SHOWN[name].meaning,
        _GROUP_OF.get(name, "in_use"),
    )
    for name in _ORDER
)
"""All parts in drawing order."""

_DRAWN = {name: place for place, name in enumerate(_ORDER)}
_SHRUNK_FIRST = (
    "outside_allocator",
    "rmm",
    "communicators",
    "releasable",
    "cached",
    "private_pools",
    "stranded",
)
_SHRUNK = {
    name: place for place, name in enumerate(dict.fromkeys((*_SHRUNK_FIRST, *reversed(_ORDER))))
}


def rank_parts(device: DeviceSample, outside: int | None) -> tuple[PartBytes, ...]:
    """Return what one process holds on a device; the parts add up to reserved and outside bytes.

    Without a valid sample there are no parts. Statistics are read when a step ends and the snapshot
    at a random time. The parts in use describe the moment at which more was in use, as in
    rank:torchmem_in_use_bytes:max. Memory that an engine has returned to the driver is left out. If
    `outside` is below zero, that many reserved bytes are not on the device either, and it is
    unknown which bytes these are.
    """
    asleep = known_components(device).get(ASLEEP, 0)
    if asleep:
        device = _awake(device, asleep)
        outside = None if outside is None else outside + asleep
    allocator, reserved = device.allocator, _reserved(device)
    if allocator is None and device.rmm and device.rmm.serves_pytorch:
        return (PartBytes("rmm", device.rmm.held_bytes),) if device.rmm.held_bytes else ()
    if allocator is None or reserved is None:
        return ()
    if outside is not None and outside < 0:
        on_device = max(0, reserved + outside)
        return (PartBytes("in_use", on_device),) if on_device else ()
    cache = _cache(allocator, device.layout, reserved)
    in_use = reserved - sum(part.bytes for part in cache)
    parts = _fitted([*_in_use(device, allocator, in_use), *cache], reserved)
    return tuple(part for part in (*parts, *_outside(device, outside or 0)) if part.bytes)


def _outside(device: DeviceSample, outside: int) -> list[PartBytes]:
    """Return what is outside the allocator by owner; what no library counts is the rest."""
    counted = _counted(device)
    found = _fitted([PartBytes(name, size) for name, size in counted.items()], outside)
    rest = outside - sum(part.bytes for part in found)
    return [PartBytes("outside_allocator", rest), *found]


def _counted(device: DeviceSample) -> dict[str, int]:
    """Return what libraries outside the allocator hold by their own count."""
    rmm = device.rmm.held_bytes if device.rmm else 0
    return {"communicators": held_bytes(device.communicators.values()), "rmm": rmm}


def device_parts(device: DeviceSample, driver_free: int | None) -> tuple[PartBytes, ...]:
    """Return the parts of a whole device as one of its processes knows it, without NVML.

    `driver_free` was read with the statistics of `device`. The result is empty if it is None, or if
    some reserved bytes are not on the device and it is unknown which. Where the device shares the
    host's memory, what is not PyTorch's is also what the host uses.
    """
    outside = outside_bytes(device, driver_free)
    is_known = device.shares_host_memory or outside is not None
    if device.total_bytes is None or driver_free is None or not is_known:
        return ()
    counted = min(outside or 0, sum(_counted(device).values()))
    # `outside` is without what is asleep already, which the parts of a rank leave out themselves.
    asleep = known_components(device).get(ASLEEP, 0)
    held = rank_parts(device, counted - asleep if counted else None)
    return _whole(device.total_bytes, held, driver_free, None, 0)


def known_components(device: DeviceSample) -> dict[str, int]:
    """Return the components if they add up to the device's active bytes, else nothing."""
    allocator, components = device.allocator, dict(device.components)
    is_whole = allocator and sum(components.values()) == allocator.active_bytes.total
    return components if is_whole else {}


def _awake(device: DeviceSample, asleep: int) -> DeviceSample:
    """Return a device without the bytes that its process has given back but still counts."""
    allocator, layout = device.allocator, device.layout
    if allocator is None:
        return device
    if layout is not None and layout.in_use_bytes is not None:
        layout = replace(layout, in_use_bytes=max(0, layout.in_use_bytes - asleep))
    return replace(
        device,
        allocator=replace(
            allocator,
            allocated_bytes=_less(allocator.allocated_bytes, asleep),
            active_bytes=_less(allocator.active_bytes, asleep),
            reserved_bytes=_less(allocator.reserved_bytes, asleep),
        ),
        layout=layout,
        components={name: n for name, n in device.components.items() if name != ASLEEP},
    )


def _less(sizes: ByPool, asleep: int) -> ByPool:
    return ByPool(None, None, max(0, sizes.total - asleep))


def tensor_bytes(
    device: DeviceSample, outside: int | None, parts: Iterable[PartBytes]
) -> int | None:
    """Return the bytes of tensors in `parts`, which are `rank_parts`; None if unknown."""
    if device.allocator is None or (outside is not None and outside < 0):
        return None
    return sum(part.bytes for part in parts if part.name in _TENSORS)


_TENSORS = {*COMPONENTS, "in_use"} - {"pending"}


def _reserved(device: DeviceSample) -> int | None:
    return plausible(device.allocator.reserved_bytes.total) if device.allocator else None


def _cache(allocator: Allocator, layout: Layout | None, reserved: int) -> list[PartBytes]:
    """Return the memory that is reserved and not in use.

    It is unknown whether memory that was cached since the snapshot is stranded. The rest is scaled
    down if the cache has shrunk.
    """
    free_now = max(0, reserved - allocator.active_bytes.total)
    if layout is None:
        return [PartBytes("cached", free_now)]
    in_use = layout.in_use_bytes
    if in_use is not None and in_use > reserved:
        in_use = None  # the cache was released after the snapshot
    if in_use is not None:
        free_now = min(free_now, reserved - in_use)
    sizes = {
        "stranded": layout.stranded_bytes,
        "releasable": layout.releasable_bytes,
        "private_pools": layout.private_free_bytes,
    }
    free_then = sum(sizes.values())
    if free_then > free_now:
        sizes = {name: size * free_now // free_then for name, size in sizes.items()}
        sizes["releasable"] += free_now - sum(sizes.values())
    elif in_use is not None:
        sizes["cached"] = free_now - free_then
    return [PartBytes(name, size) for name, size in sizes.items()]


def _in_use(device: DeviceSample, allocator: Allocator, in_use: int) -> list[PartBytes]:
    """Return what is in use by component, if the components are known.

    If more is in use than at the latest read, that was the snapshot's moment, in the middle of a
    step: what lasts from step to step was there too, and the rest are gradients or of the step.
    """
    active = allocator.active_bytes.total
    pending = max(0, active - allocator.allocated_bytes.total)
    components = known_components(device)
    if in_use > active and device.layout is not None:
        pending = min(device.layout.pending_free_bytes or 0, in_use)
        lasting = {name: n for name, n in components.items() if name not in PASSING}
        rest = in_use - pending - sum(lasting.values())
        name = "gradients_or_step" if "gradients" in components else "step"
        components = {**lasting, name: rest, "pending": pending} if lasting and rest >= 0 else {}
    pending = min(pending, in_use)
    components = components or {"in_use": in_use - pending, "pending": pending}
    known = (COMPONENTS.keys() | {"in_use"}) - {"other"}
    return [
        PartBytes(name, size) if name in known else PartBytes("other", size, name)
        for name, size in components.items()
    ]


def gpu_parts(
    total: int,
    ranks: Iterable[Sequence[NamedBytes]],
    free: int | None,
    driver: int | None = None,
    dead: int = 0,
) -> tuple[PartBytes, ...]:
    """Return the parts of a GPU of `total` bytes, which add up to it.

    `ranks`: the parts of each live rank. `free`: what the driver has free, best when a rank read
    its statistics, which is the moment of the ranks' parts; if None, only their parts are known.
    `driver`: what NVML says the driver keeps for itself; None without NVML, where what is neither
    free nor PyTorch's is one part. `dead`: what processes hold that are gone. Several ranks are not
    read at the same moment: if their parts do not fit together on the GPU, the parts outside the
    allocator and the free ones shrink first.
    """
    return _whole(total, _sums(ranks), free, driver, dead)


def _whole(
    total: int, held: Sequence[PartBytes], free: int | None, driver: int | None, dead: int
) -> tuple[PartBytes, ...]:
    """Return what is held, shrunk until it fits, and what else there is of `total` bytes."""
    available = total - (driver or 0)
    held = _fitted(held, available)
    rest = available - sum(part.bytes for part in held)
    if free is None:
        others = []
    else:
        name = "not_pytorch" if driver is None else "other_processes"
        free = min(free, rest)
        dead = min(dead, rest - free)
        others = [
            PartBytes(name, rest - free - dead),
            PartBytes("dead_processes", dead),
            PartBytes("free", free),
        ]
    sizes = [*held, *others, PartBytes("driver", driver or 0)]
    return tuple(sorted((part for part in sizes if part.bytes), key=_place))


def part_words(part: PartBytes, unread_steps: int | None = None) -> str:
    """Return what texts call a part.

    If `unread_steps` have ended since the latest read at a step's end, what was allocated since
    then is from more than this step; None if their number is unknown.
    """
    last = f"the last {unread_steps + 1:,} steps" if unread_steps else None
    if last and part.name == "step":
        return f"allocated in {last}"
    if last and part.name == "gradients_or_step":
        return f"gradients, or of {last}"
    return part.label or _SHOWN[part.name].words


def component_words(name: str) -> str:
    """Return what texts call a component: a name that a script gave stands for itself."""
    return COMPONENTS[name].words if name in COMPONENTS else name


def _sums(ranks: Iterable[Sequence[NamedBytes]]) -> list[PartBytes]:
    """Return the sum of each part over the ranks, without the names that scripts gave."""
    sums: dict[str, int] = {}
    for parts in ranks:
        for part in parts:
            sums[part.name] = sums.get(part.name, 0) + part.bytes
    return [PartBytes(name, size) for name, size in sums.items()]


def _fitted(parts: Sequence[PartBytes], size: int) -> list[PartBytes]:
    """Return the parts in drawing order, shrunk until they have at most `size` bytes."""
    excess = sum(part.bytes for part in parts) - size
    fitted = []
    for part in sorted(parts, key=lambda part: _SHRUNK[part.name]):
        cut = min(max(0, excess), part.bytes)
        excess -= cut
        fitted.append(PartBytes(part.name, part.bytes - cut, part.label))
    return sorted(fitted, key=_place)


def _place(part: PartBytes) -> int:
    return _DRAWN[part.name]


def group_bytes(parts: Iterable[NamedBytes]) -> tuple[int, ...]:
    """Return the bytes of each of GROUPS."""
    sums = dict.fromkeys((group.name for group in GROUPS), 0)
    for part in parts:
        group = _GROUP_OF.get(part.name, "in_use")
        if group:
            sums[group] += part.bytes
    return tuple(sums.values())


def plausible(size: int | None) -> int | None:
    """Return a size that a GPU can have, else None."""
    return size if size is not None and size <= MAX_GPU_BYTES else None
