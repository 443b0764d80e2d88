"""What each tool answers, by its name. Runs in a process of its own, see `worker`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchmem.node.ranks import ProcessFilter
from torchmem.why.answer import NodeAnswer

Arguments = Mapping[str, Any]


def answer(tool: str, arguments: Arguments, run_dir: str, exporter: str | None) -> NodeAnswer:
    """Return the answer of a tool. Raise TorchmemError."""
    from torchmem.mcp import recordings, texts

    about_file: dict[str, Callable[..., NodeAnswer]] = {
        "read_snapshot": recordings.read_snapshot,
        "what_if": recordings.what_if,
        "explain_text": texts.explain_text,
    }
    if tool in about_file:
        return about_file[tool](**arguments)
    return _about_node(tool, arguments, run_dir, exporter)


def _about_node(tool: str, arguments: Arguments, run_dir: str, exporter: str | None) -> NodeAnswer:
    from torchmem.why.exporter import ExporterNode
    from torchmem.why.local import LocalNode
    from torchmem.why.node_answers import NodeTools

    node = NodeTools(LocalNode(Path(run_dir)) if exporter is None else ExporterNode(exporter))
    tools: dict[str, Callable[[], NodeAnswer]] = {
        "list_ranks": lambda: node.list_ranks(arguments["run"]),
        "rank_report": lambda: node.rank_report(_selected(arguments)),
        "what_holds_memory": lambda: node.what_holds_memory(_selected(arguments)),
        "oom_reports": lambda: node.oom_reports(arguments["run"]),
        "explain_oom": lambda: node.explain_oom(arguments["file"], _selected(arguments)),
    }
    return tools[tool]()


def _selected(arguments: Arguments) -> ProcessFilter:
    return ProcessFilter(arguments["rank"], arguments["run"], arguments["pid"], arguments["launch"])
