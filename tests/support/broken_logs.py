"""Logs of eight ranks in which messages are cut, wrapped, interleaved, colored and wrapped in JSON.

What a message means is known by the size of its request, which is different in each.
"""

from __future__ import annotations

import io
import json
import random
import textwrap
from collections.abc import Callable, Iterator

from torchmem.explain.texts.formats import TextCause
from torchmem.explain.texts.scan import Finding, Findings, scan
from torchmem.why.text import TextAnswer, decoded

MARK = b"# eight ranks\n"
RANKS = 8


def _text(asked: str, gpu: int, free: str, tensors: str, unused: str, *holders: str) -> str:
    """Return PyTorch's message; `holders` are its clauses about processes and limits."""
    asks = f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU {gpu} has"
    total = f"a total capacity of 79.10 GiB of which {free} is free."
    holds = f"Of the allocated memory {tensors} is allocated by PyTorch,"
    rest = f"and {unused} is reserved by PyTorch but unallocated."
    return " ".join((asks, total, *holders, holds, rest))


def _own(size: str) -> str:
    return f"Including non-PyTorch memory, this process has {size} memory in use."


_NEIGHBOR = "Process 81234 has 40.20 GiB memory in use."
_LIMIT = "39.55 GiB allowed;"
_OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 1.28 GiB (GPU 7; 10.76 GiB total capacity;"
    " 4.80 GiB already allocated; 60.40 MiB free; 9.90 GiB reserved in total by PyTorch)"
)
MESSAGES: dict[str, tuple[TextCause | None, str]] = {
    "2.01 GiB": (
        "fragmentation",
        _text("2.01 GiB", 0, "1.12 GiB", "61.40 GiB", "15.20 GiB", _own("77.90 GiB")),
    ),
    "2.02 GiB": (
        "capacity",
        _text("2.02 GiB", 1, "312.00 MiB", "77.40 GiB", "614.20 MiB", _own("78.70 GiB")),
    ),
    "1.53 GiB": (
        "external",
        _text("1.53 GiB", 2, "402.00 MiB", "36.70 GiB", "1.10 GiB", _NEIGHBOR, _own("38.40 GiB")),
    ),
    "2.04 GiB": (
        "limit",
        _text("2.04 GiB", 3, "38.60 GiB", "37.90 GiB", "1.20 GiB", _own("40.20 GiB"), _LIMIT),
    ),
    "96.00 GiB": (
        "capacity",
        _text("96.00 GiB", 4, "70.30 GiB", "7.90 GiB", "110.00 MiB", _own("8.70 GiB")),
    ),
    "1.06 GiB": (
        None,
        _text("1.06 GiB", 5, "520.00 MiB", "73.20 GiB", "4.00 GiB", _own("78.50 GiB")),
    ),
    "2.07 GiB": (
        "refused",
        _text("2.07 GiB", 6, "10.40 GiB", "66.30 GiB", "1.10 GiB", _own("68.60 GiB")),
    ),
    "1.28 GiB": ("fragmentation", _OLD),
}
_NOISE = (
    "step {n} loss 2.31 lr 0.0003 memory 61.2 GiB",
    "iteration {n}/ 90000 | tokens per second 1020",
    "Traceback (most recent call last):",
    '  File "/job/model.py", line {n}, in forward',
    "    raise torch.OutOfMemoryError(message)",
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={n})",
    "[W CUDACachingAllocator.cpp:508] memory allocation failed with OOM on device 0",
    "{n}%|####      | {n}/1000 [00:58<07:10,  2.04it/s]",
)
_COLORS = ("\x1b[31m", "\x1b[0m", "\x1b[1;33m", "\x1b[K")


def write(rng: random.Random, _: object = None) -> bytes:
    """Return a log."""
    shape = rng.choice(_SHAPES)
    lines = [shape(rank, line, rng) for rank, line in _interleaved(rng, [*_of_ranks(rng)])]
    if rng.random() < 0.1:
        lines = [line[: rng.randrange(len(line) + 1)] for line in lines]
    end = rng.choice(("\n", "\n", "\n", "\r\n"))
    return MARK + end.join(lines).encode()


def _of_ranks(rng: random.Random) -> Iterator[list[tuple[int, str]]]:
    for rank, (_, text) in enumerate(MESSAGES.values()):
        lines = [
            rng.choice(_NOISE).format(n=rng.randrange(1, 999)) for _ in range(rng.randrange(4))
        ]
        message = _colored(rng, text) if rng.random() < 0.3 else text
        lines += _broken(rng, message)
        yield [(rank, line) for line in lines]


def _colored(rng: random.Random, text: str) -> str:
    words = text.split(" ")
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(words))
        words[at] = f"{rng.choice(_COLORS)}{words[at]}\x1b[0m"
    return " ".join(words)


def _broken(rng: random.Random, text: str) -> list[str]:
    """Return a message in lines: whole, cut off, wrapped, divided anywhere, or with a line lost."""
    kind = rng.randrange(5)
    if kind == 1:
        return [text[: rng.randrange(len(text))]]
    if kind == 2:
        return _wrapped(text, rng.randrange(30, 120))
    if kind == 3:
        at = rng.randrange(len(text))
        return [text[:at], text[at:]]
    if kind == 4:
        lines = _wrapped(text, rng.randrange(30, 120))
        del lines[rng.randrange(len(lines))]
        return lines
    return [text]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _interleaved(
    rng: random.Random, queues: list[list[tuple[int, str]]]
) -> Iterator[tuple[int, str]]:
    is_mixed = rng.random() < 0.7
    waiting = [queue for queue in queues if queue]
    while waiting:
        queue = rng.choice(waiting) if is_mixed else waiting[0]
        yield queue.pop(0)
        waiting = [each for each in waiting if each]


def _plain(_: int, line: str, __: random.Random) -> str:
    return line


def _labeled(rank: int, line: str, _: random.Random) -> str:
    return f"[rank{rank}]: {line}"


def _by_srun(rank: int, line: str, _: random.Random) -> str:
    return f"{rank}: {line}"


def _timed(rank: int, line: str, rng: random.Random) -> str:
    return f"2026-03-04 05:06:{rng.randrange(60):02d},123 [rank{rank}] {line}"


def _by_docker(rank: int, line: str, _: random.Random) -> str:
    text = f"[rank{rank}]: {line}\n"
    return json.dumps({"log": text, "stream": "stderr", "time": "2026-03-04T05:06:07.1Z"})


def _structured(rank: int, line: str, _: random.Random) -> str:
    return json.dumps({"level": "error", "rank": rank, "message": line})


_SHAPES: tuple[Callable[[int, str, random.Random], str], ...] = (
    _plain,
    _labeled,
    _by_srun,
    _timed,
    _by_docker,
    _structured,
)


class _Checked(Findings):
    """Findings of which each message is checked, not only the first of its kind."""

    def add(self, found: Finding) -> bool:
        message, truths = found.message, _TRUTHS
        if message and message.format.name == "pytorch" and message.numbers.requested in truths:
            truth = truths[message.numbers.requested]
            assert found.judged.cause in {None, truth}, (found.judged.cause, truth, found.excerpt)
        return super().add(found)


_TRUTHS = {
    round(float(size.split()[0]) * (1 << 30)): cause for size, (cause, _) in MESSAGES.items()
}


def check(content: bytes) -> bool:
    """Check that a text is explained, in printable words, and no cause in a log is wrong.

    Returns whether anything was explained.
    """
    findings = _Checked() if content.startswith(MARK) else Findings()
    scan(decoded(io.BytesIO(content)), findings, "log")
    answer = TextAnswer(["log"], findings)
    shown = answer.words()
    assert shown.replace("\n", "").isprintable(), shown
    assert json.loads(answer.json_lines()[0])["explained"] == answer.is_explained
    return answer.is_explained
