"""A message in words: the sentence, its numbers, and what it cannot say."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from torchmem.allocator.sizes import format_size
from torchmem.explain.headline import headline, refusal
from torchmem.explain.oom_report import CAUSE_SUMMARIES, failure_reason
from torchmem.explain.texts.formats import TextCause
from torchmem.explain.texts.judgment import Judged
from torchmem.explain.texts.numbers import Message, Numbers
from torchmem.explain.texts.tables import Table
from torchmem.sample.sample import OOM_CAUSES

TEXT_CAUSES: Mapping[TextCause, str] = {
    **{cause: CAUSE_SUMMARIES[cause] for cause in OOM_CAUSES},
    "refused": "the driver refused memory although it had enough",
    "host_memory": "the host's memory ran out, not the GPU's",
}
"""The causes of a verdict, and those that only a text tells."""
PHRASES: Mapping[TextCause, str] = {
    "capacity": "the GPU is too small for this",
    "fragmentation": "enough is free, but not in one piece",
    "limit": "a limit was reached",
    "external": "other processes hold the memory",
    "pending": "a block was waiting for another stream",
    "library": "PyTorch's cache left a library no memory",
}
MANY_BYTES = 1 << 30

NUMBER_WORDS = {
    "requested": "requested",
    "total": "memory of the GPU",
    "free": "free at the driver",
    "allowed": "allowed by a limit",
    "allocated": "allocated by PyTorch",
    "private": "of these free in private pools",
    "reserved": "reserved by PyTorch",
    "unallocated": "reserved, without a tensor",
    "other": "other memory of the process",
    "available": "available for the KV cache",
    "before": "free before",
    "resident": "host memory of the process",
}


def sentence(message: Message, judged: Judged) -> str:
    """Return what the message says of the cause, without a full stop."""
    if message.format.role != "oom":
        return message.format.meaning.partition(". ")[0].rstrip(".")
    if message.format.summary:
        return message.format.summary
    if judged.detail == "pool":
        free = format_size(message.numbers.private or 0)
        return (
            f"Fragmentation: {free} was free in the pools of CUDA graphs and MemPools, which this "
            "request cannot use"
        )
    if judged.cause in _BY_CAUSE:
        return _BY_CAUSE[judged.cause](message.numbers, judged)
    return _plain(judged)


def _plain(judged: Judged) -> str:
    if judged.report is not None:
        return headline(judged.report)
    if judged.cause is not None:
        text = TEXT_CAUSES[judged.cause]
        return f"{text[0].upper()}{text[1:]}"
    if judged.candidates:
        *first, last = (f"{each} ({PHRASES[each]})" for each in judged.candidates)
        return f"The message does not decide between {', '.join(first)} and {last}"
    return "Memory ran out; the message does not say why"


def _refused(numbers: Numbers, _: Judged) -> str:
    return refusal(numbers.requested or 0, numbers.free or 0)


def _external(_: Numbers, judged: Judged) -> str:
    """Return which process holds how much."""
    known = [holder for holder in judged.holders if holder.bytes]
    if not known:
        if judged.report is not None:
            return headline(judged.report)
        return "Other processes held memory of the GPU, or released it just then"
    first, *rest = known
    others = f", and {len(rest)} more" if rest else ""
    return f"Process {first.pid} holds {format_size(first.bytes or 0)} of the GPU{others}"


def _capacity(numbers: Numbers, judged: Judged) -> str:
    requested, total = numbers.requested or 0, numbers.total or 0
    if judged.report is None:
        return _plain(judged)
    if requested > total:
        return (
            f"The request of {format_size(requested)} is more than the GPU has "
            f"({format_size(total)})"
        )
    tensors = numbers.allocated or 0
    if tensors > total:
        return (
            f"Tensors take {format_size(tensors)}, more than the GPU has ({format_size(total)}), "
            "and nothing more was free"
        )
    missing = requested - sum(
        each or 0 for each in (numbers.free, numbers.unallocated, numbers.private)
    )
    if missing > 0:
        return (
            f"The GPU is full of tensors: {format_size(missing)} was missing, even without any "
            "fragmentation"
        )
    return "The GPU is full of tensors: what was free would not have lasted"


_BY_CAUSE: Mapping[TextCause | None, Callable[[Numbers, Judged], str]] = {
    "refused": _refused,
    "external": _external,
    "capacity": _capacity,
}


def reason(message: Message, judged: Judged) -> str:
    """Return why the request failed, in a few sentences."""
    about = "" if judged.report is None else " ".join(failure_reason(judged.report))
    return " ".join(filter(None, [about or message.format.meaning, *_more(message, judged)]))


def _more(message: Message, judged: Judged) -> Iterator[str]:
    numbers = message.numbers
    if judged.cause == "capacity" and (numbers.allocated or 0) > (numbers.total or math.inf):
        yield (
            "On Windows and WSL, the driver moves what does not fit into host memory, which is "
            "many times slower."
        )
    if judged.own_pid is not None:
        yield (
            f"The listed process {judged.own_pid} is this process itself, under its pid on the "
            "host: in a container, PyTorch does not recognize it."
        )
    if judged.unlisted and judged.unlisted >= MANY_BYTES:
        yield (
            f"{format_size(judged.unlisted)} belongs to no listed process: to one in another "
            "container, or to one that has ended."
        )


def number_facts(message: Message, judged: Judged) -> Iterator[tuple[str, int]]:
    """Yield the numbers of the message with their names, in bytes."""
    for name, words in NUMBER_WORDS.items():
        size = getattr(message.numbers, name)
        if size is not None:
            yield words, size
    for holder in judged.holders:
        if holder.bytes is not None:
            yield f"process {holder.pid}", holder.bytes
    if judged.compaction is not None:
        yield "compaction gives at most", judged.compaction


def cannot_say(message: Message, judged: Judged) -> Iterator[str]:
    """Yield what would be good to know and the message does not say."""
    if message.format.role != "oom":
        return
    if message.format.chains and not message.is_whole:
        yield "the rest of its numbers, as the text is cut off"
    if judged.candidates:
        yield "how much more the step still needed, which decides between these causes"
    if judged.cause in {"capacity", "fragmentation", "limit", None} and not message.format.summary:
        yield "what holds the memory, or whether it grew from step to step"
    if judged.cause == "fragmentation":
        yield "whether free blocks waited for another stream"
    if judged.cause == "external" and not judged.holders:
        yield "which processes hold the memory"
    if judged.cause == "library" and message.numbers.requested is None:
        yield "how much it asked for, and how much PyTorch could have released"


def table_facts(table: Table) -> Iterator[tuple[str, int]]:
    """Yield the numbers of a table with their names, in bytes."""
    names = {
        "allocated": "tensors",
        "active": "tensors, and blocks that wait",
        "reserved": "reserved by PyTorch",
        "stranded": "free beside tensors",
        "allocated_peak": "tensors at the peak",
        "reserved_peak": "reserved at the peak",
    }
    for name, words in names.items():
        size = getattr(table, name)
        if size is not None:
            yield words, size
    for use in table.gpus:
        yield f"GPU {use.gpu} in use", use.used
        yield f"GPU {use.gpu} in total", use.total
        for holder in use.holders:
            if holder.bytes is not None:
                yield f"process {holder.pid} on GPU {use.gpu}", holder.bytes


def table_sentence(table: Table) -> str:
    """Return what a table says, without a full stop."""
    if table.gpus:
        fullest = max(table.gpus, key=lambda use: use.used / max(1, use.total))
        share = f"{fullest.used / max(1, fullest.total):.0%}"
        known = [holder for holder in fullest.holders if holder.bytes is not None]
        largest = max(known, key=lambda holder: holder.bytes or 0, default=None)
        who = f", most by process {largest.pid}" if largest else ""
        return f"GPU {fullest.gpu} is the fullest: {share} of its memory is in use{who}"
    plural = "s" * (table.ooms != 1)
    counts = f"{table.ooms:,} request{plural} had failed, " if table.ooms else ""
    if table.reserved is not None and table.allocated is not None:
        unused = format_size(max(0, table.reserved - table.allocated))
        return f"{counts}{unused} of what PyTorch had reserved held no tensor"
    return f"{counts}the table lacks the reserved or the allocated bytes"
