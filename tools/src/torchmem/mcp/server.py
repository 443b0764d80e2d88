"""The tools as an assistant sees them. The only file that imports the SDK of the protocol."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Annotated, Any, Literal

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.server.stdio import stdio_server
from mcp.types import CallToolResult, TextContent, Tool, ToolAnnotations
from pydantic import Field

from torchmem.mcp.answer import NOTE
from torchmem.mcp.recordings import MAX_ROWS, MAX_SETTINGS
from torchmem.mcp.texts import MAX_CHARACTERS
from torchmem.mcp.worker import MAX_PROCESSES, Reply, Source, ask
from torchmem.sample.errors import did_you_mean
from torchmem.sample.launch import MAX_LENGTH
from torchmem.why.snapshot import DEFAULT_ROWS

READ_ONLY = ToolAnnotations(
    read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
)
INSTRUCTIONS = f"""\
torchmem monitors the GPU memory of PyTorch jobs. Start with list_ranks for a job that runs, with \
explain_oom after an OutOfMemoryError, and with explain_text if there is only a message or a log. \
The texts have the sentences of the commands \
`torchmem why` and `whatif`. Sizes in the data are bytes, times are Unix \
seconds, and what is unknown is left out. No tool changes anything. {NOTE}"""
PROMPT = """\
Explain the last out-of-memory error of my PyTorch job. Call explain_oom. Say in one sentence why \
the request failed, then what held the memory, then what to change first and what it gains. Quote \
the numbers of the answer, and do not recommend what it says would not help."""

Run = Annotated[str | None, Field(description="name of the run; default: any", max_length=200)]
Launch = Annotated[
    str | None,
    Field(
        description="launch of the run, as list_ranks shows it; default: the newest",
        max_length=MAX_LENGTH,
    ),
]
Rank = Annotated[int | None, Field(description="global rank; default: any", ge=0)]
Pid = Annotated[int | None, Field(description="process id; default: any", ge=1)]
Gpu = Annotated[int | None, Field(description="N of cuda:N in the file; default: all", ge=0)]
Snapshot = Annotated[
    str,
    Field(
        description="absolute path of a file of torch.cuda.memory._dump_snapshot or "
        "`torchmem capture`",
        max_length=4096,
    ),
]
Report = Annotated[
    str | None,
    Field(description="path of a report, as oom_reports lists it", max_length=4096),
]
Text = Annotated[
    str | None,
    Field(description="error message, or part of a log", max_length=MAX_CHARACTERS),
]
Log = Annotated[
    str | None, Field(description="absolute path of a text, such as a log", max_length=4096)
]
Moment = Annotated[
    Literal["end", "peak", "oom"] | None,
    Field(description="default: the OutOfMemoryError if there is one, else the end"),
]
Rows = Annotated[int, Field(description="rows of each table", ge=1, le=MAX_ROWS)]
Settings = Annotated[
    list[Annotated[str, Field(max_length=500)]],
    Field(
        description="settings to try instead of the usual ones, such as max_split_size_mb:256",
        max_length=MAX_SETTINGS,
    ),
]
GpuModel = Annotated[
    str | None,
    Field(
        description="another GPU to replay on: a size such as 24GB, or a name such as "
        "h100-sxm-80gb; default: as in the file",
        max_length=100,
    ),
]


class Tools:
    """The tools; the docstrings are what an assistant reads."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._free = asyncio.Semaphore(MAX_PROCESSES)

    async def list_ranks(self, run: Run = None) -> CallToolResult:
        """List the ranks of PyTorch jobs with the state of their GPU memory.

        One line per rank and GPU: run, launch, rank, pid, GPU, state, allocated and reserved bytes,
        the headroom (the largest request that would succeed), the fragmentation index (FI, 0 to 1),
        and what threatens the rank or how it ended.
        """
        return await self._ask("list_ranks", run=run)

    async def rank_report(
        self, rank: Rank = None, run: Run = None, launch: Launch = None, pid: Pid = None
    ) -> CallToolResult:
        """Show what a rank's memory is used for, what threatens it, and what to set."""
        return await self._ask("rank_report", rank=rank, run=run, launch=launch, pid=pid)

    async def what_holds_memory(
        self, rank: Rank = None, run: Run = None, launch: Launch = None, pid: Pid = None
    ) -> CallToolResult:
        """Show the parts of a rank's memory, such as parameters and optimizer state.

        Also names the lines of code that held memory at an OutOfMemoryError, if they were recorded,
        and recordings of this rank that read_snapshot can read.
        """
        return await self._ask("what_holds_memory", rank=rank, run=run, launch=launch, pid=pid)

    async def oom_reports(self, run: Run = None) -> CallToolResult:
        """List the newest reports of OutOfMemoryErrors, at most 50."""
        return await self._ask("oom_reports", run=run)

    async def explain_oom(
        self,
        file: Report = None,
        rank: Rank = None,
        run: Run = None,
        launch: Launch = None,
        pid: Pid = None,
    ) -> CallToolResult:
        """Explain an OutOfMemoryError: why it failed, what held the memory, and what to do.

        Without `file`, it is the newest report that matches.
        """
        return await self._ask("explain_oom", file=file, rank=rank, run=run, launch=launch, pid=pid)

    async def read_snapshot(
        self,
        file: Snapshot,
        at: Moment = None,
        gpu: Gpu = None,
        rows: Rows = DEFAULT_ROWS,
        only_leaks: bool = False,
    ) -> CallToolResult:
        """Show what holds the memory in a snapshot of PyTorch's allocator.

        By line of code, module, size, age and pool. With `only_leaks`, the lines that allocate
        throughout the recording and never free.
        """
        return await self._ask(
            "read_snapshot", file=file, at=at, gpu=gpu, rows=rows, only_leaks=only_leaks
        )

    async def what_if(
        self,
        file: Snapshot,
        settings: Settings = [],  # noqa: B006 - never changed
        gpu_model: GpuModel = None,
        gpu: Gpu = None,
    ) -> CallToolResult:
        """Replay a snapshot's allocations under other allocator settings, and recommend one."""
        return await self._ask(
            "what_if", file=file, settings=settings, gpu_model=gpu_model, gpu=gpu
        )

    async def explain_text(self, text: Text = None, file: Log = None) -> CallToolResult:
        """Explain an error message or a log that says that GPU or host memory ran out.

        Pass the text itself, or the path of a file. It works without torchmem in the job, for
        PyTorch, NCCL, cuBLAS, Triton, vLLM, SGLang, the kernel, Kubernetes and Slurm. Where the
        text does not decide the cause, there is none.
        """
        return await self._ask("explain_text", text=text, file=file)

    async def _ask(self, tool: str, **arguments: Any) -> CallToolResult:
        async with self._free:
            return _result(await ask(self._source, tool, arguments))


class ToolServer(MCPServer):
    """A server whose tools refuse arguments that they do not have: the SDK ignores them."""

    async def list_tools(self) -> list[Tool]:
        """Return the tools; their schemas allow no other arguments."""
        tools = await super().list_tools()
        for tool in tools:
            tool.input_schema["additionalProperties"] = False
        return tools

    async def call_tool(self, name: str, arguments: dict[str, Any], *more: Any, **rest: Any) -> Any:
        """Call a tool, or answer with one sentence about the first unknown argument."""
        known = {
            tool.name: list(tool.input_schema["properties"]) for tool in await self.list_tools()
        }
        for argument in arguments:
            if name in known and argument not in known[name]:
                takes = f"it takes {', '.join(known[name])}."
                hint = did_you_mean(argument, known[name], takes)
                text = f"unknown argument {argument!r} of {name}: {hint}"
                return _result(Reply.error(text))
        return await super().call_tool(name, arguments, *more, **rest)

    async def run_stdio_async(self) -> None:
        """Serve on stdin and stdout, and answer messages with text that is none, too."""
        options = self._lowlevel_server.create_initialization_options()
        async with stdio_server(stdin=_lines()) as (incoming, outgoing):  # type: ignore[arg-type]
            await self._lowlevel_server.run(incoming, outgoing, options)


async def _lines() -> AsyncIterator[str]:
    """Yield the lines of stdin with whole characters only.

    The SDK drops a message with half of a surrogate pair, and the assistant would wait for it.
    """
    decoded = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8", errors="replace")
    async for line in anyio.wrap_file(decoded):
        yield _with_whole_characters(line) if "\\ud" in line.lower() else line


def _with_whole_characters(line: str) -> str:
    """Return JSON with U+FFFD in place of surrogates without their other half."""
    try:
        text = json.dumps(json.loads(line), ensure_ascii=False)
    except (ValueError, RecursionError):
        return line  # the SDK's parser refuses it as well
    # Only in UTF-16 is a lone surrogate one unit: by way of UTF-8 it would become three U+FFFD.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _result(reply: Reply) -> CallToolResult:
    return CallToolResult(
        content=[TextContent(type="text", text=reply.text)],
        structured_content=reply.data,
        is_error=reply.is_error,
    )


def serve(source: Source) -> None:
    """Serve on stdin and stdout until the end of stdin."""
    server = ToolServer(
        "torchmem",
        title="GPU memory of PyTorch jobs",
        instructions=INSTRUCTIONS,
        version=version("torchmem"),
        log_level="WARNING",
    )
    tools = Tools(source)
    for tool in (
        tools.list_ranks,
        tools.rank_report,
        tools.what_holds_memory,
        tools.oom_reports,
        tools.explain_oom,
        tools.read_snapshot,
        tools.what_if,
        tools.explain_text,
    ):
        server.add_tool(tool, annotations=READ_ONLY, structured_output=False)
    server.prompt(title="Explain the last out-of-memory error")(explain_last_oom)
    server.run("stdio")


def explain_last_oom() -> str:
    """Explain the last out-of-memory error, and what to change."""
    return PROMPT
