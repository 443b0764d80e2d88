"""One process for each call of a tool: it has bounds of its own, and can be ended at any time.

It gets the question on stdin and answers on stdout, both as JSON. What the code of the commands
prints goes to stderr, so nothing but the protocol reaches the assistant.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from torchmem.mcp.answer import bounded, noted_text
from torchmem.trace.interpreter import isolated, without_python_variables

MAX_SECONDS = 50.0
"""Assistants often give up after 60 seconds."""
MAX_MEMORY_BYTES = 4 << 30
MAX_PROCESSES = 2
NICENESS = 10  # training on this node comes first
# sys.path is that of the server: neither the working directory nor startup files matter.
_PROGRAM = "sys.path[:] = sys.argv[1:]; from torchmem.mcp.worker import main; main()"
_TOO_LONG = (
    f"this took longer than {MAX_SECONDS:.0f} seconds, so it was ended: run the command in a "
    "terminal, or ask for less."
)
_TOO_LARGE = f"this needs more than {MAX_MEMORY_BYTES >> 30} GiB: run the command in a terminal."
_KILLED = (
    "the process that answers this was killed by SIGKILL, with which Linux ends processes when "
    "memory runs out: try again when this machine has more free memory."
)
_FAILED = "this has failed because of an error in torchmem, which stderr of `torchmem mcp` shows."
_ENDINGS = {-signal.SIGXCPU: _TOO_LONG, -signal.SIGKILL: _KILLED}


@dataclass(frozen=True, slots=True)
class Source:
    """Where the ranks are: at the URL of an exporter, else in a run directory."""

    run_dir: str
    exporter: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A bounded answer, or with `is_error` one sentence after the note about names."""

    text: str
    data: dict[str, Any] | None = None
    is_error: bool = False

    @classmethod
    def error(cls, sentence: str) -> Reply:
        """Return an error. Its sentence may name runs and files, like an answer."""
        return cls(noted_text(sentence), is_error=True)


async def ask(
    source: Source, tool: str, arguments: dict[str, Any], max_seconds: float = MAX_SECONDS
) -> Reply:
    """Return the answer of a process. It is ended when this is cancelled, or takes too long."""
    question = json.dumps({"tool": tool, "arguments": arguments, **asdict(source)}).encode()
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *isolated(_PROGRAM, *sys.path),
        stdin=pipe,
        stdout=pipe,
        env=without_python_variables(os.environ),
        start_new_session=True,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(question), max_seconds)
    except asyncio.TimeoutError:  # not the built-in one before Python 3.11
        _end(process)
        await process.wait()
        return Reply.error(_TOO_LONG)
    finally:
        _end(process)
    try:
        return Reply(**json.loads(output))
    except (ValueError, TypeError):
        return Reply.error(_ENDINGS.get(process.returncode or 0, _FAILED))


def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a process that runs, and the one that reads a snapshot for it."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    """Answer the question on stdin."""
    from torchmem.trace.worker import lower_limit

    lower_limit(resource.RLIMIT_CPU, int(MAX_SECONDS))
    lower_limit(resource.RLIMIT_AS, MAX_MEMORY_BYTES)
    lower_limit(resource.RLIMIT_CORE, 0)
    os.nice(NICENESS)
    answers = os.dup(1)
    os.dup2(2, 1)
    question = json.load(sys.stdin)
    with os.fdopen(answers, "w", encoding="utf-8") as file:
        json.dump(asdict(reply(**question)), file)


def reply(tool: str, arguments: dict[str, Any], run_dir: str, exporter: str | None = None) -> Reply:
    """Return the bounded answer of a tool, or why there is none."""
    from torchmem.mcp.tools import answer
    from torchmem.sample.errors import TorchmemError

    try:
        _check(arguments)
        return Reply(**bounded(answer(tool, arguments, run_dir, exporter)))
    except TorchmemError as error:
        return Reply.error(str(error))
    except MemoryError:
        return Reply.error(_TOO_LARGE)


def _check(arguments: dict[str, Any]) -> None:
    """Raise UsageError for text that cannot be the name of a file or a run."""
    from torchmem.sample.errors import UsageError

    for name, value in arguments.items():
        if any("\0" in each for each in (value, *_items(value)) if isinstance(each, str)):
            raise UsageError(f"`{name}` has a NUL character: leave it out.")


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
