"""An assistant: the client of the protocol's SDK, with `torchmem mcp` as a child process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import Client, StdioServerParameters, stdio_client
from mcp.types import CallToolResult, TextContent

from torchmem.mcp.answer import NOTE

COMMAND = (sys.executable, "-m", "torchmem.cli", "mcp")


class Assistant:
    """A connected client, for tests without async."""

    def __init__(self, portal: BlockingPortal, client: Client) -> None:
        self.portal, self.client = portal, client

    def result(self, tool: str, **arguments: Any) -> CallToolResult:
        """Return the answer of a tool."""
        found: CallToolResult = self.portal.call(self.client.call_tool, tool, arguments)
        return found

    def answer(self, tool: str, **arguments: Any) -> tuple[str, Any]:
        """Return the text of an answer, without the note about names, and its data."""
        found = self.result(tool, **arguments)
        assert not found.is_error, text_of(found)
        note, _, text = text_of(found).partition("\n\n")
        assert note == f"({NOTE})"
        return text, found.structured_content

    def text(self, tool: str, **arguments: Any) -> str:
        """Return the text of an answer."""
        return self.answer(tool, **arguments)[0]

    def data(self, tool: str, **arguments: Any) -> Any:
        """Return the data of an answer."""
        return self.answer(tool, **arguments)[1]

    def error(self, tool: str, **arguments: Any) -> str:
        """Return the sentence of an error."""
        found = self.result(tool, **arguments)
        assert found.is_error
        assert found.structured_content is None
        return sentence(text_of(found))


def text_of(result: CallToolResult) -> str:
    """Return the only text of an answer."""
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text


def sentence(text: str) -> str:
    """Return an error without the note about names; those that the SDK writes have none."""
    return text.removeprefix(f"({NOTE})\n\n")


@contextmanager
def assistant(*flags: str | Path) -> Iterator[Assistant]:
    """Start `torchmem mcp`, connect, and end both."""
    command, *words = [*COMMAND, *map(str, flags)]
    server = StdioServerParameters(command=command, args=words, env=dict(os.environ))
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(Client(stdio_client(server))) as client,
    ):
        yield Assistant(portal, client)
