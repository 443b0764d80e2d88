"""HTTP/1.1 of one connection: uvicorn's, which tells the connection table what it is doing."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from torchmem.exporter.web.connections import Connection


class Protocol(H11Protocol):
    """A client whose certificate does not have an allowed name is not listened to."""

    def __init__(
        self,
        connection: Connection,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
    ):
        super().__init__(config, server_state, app_state)
        self._connection = connection
        self._application, self.app = self.app, self._answer
        self._admitted = False
        self._answers = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """TCP and TLS are there."""
        super().connection_made(transport)
        self._connection.transport = transport
        tls = self._connection.tls
        self._admitted = tls is None or tls.admits(transport.get_extra_info("peercert"))
        if not self._admitted:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        if self._admitted:
            self._connection.heard()
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._connection.lost()
        super().connection_lost(exc)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._connection.enter("answering")
        self._answers += 1
        try:
            await self._application(scope, receive, send)
        finally:
            self._answers -= 1
            if not self._answers:
                self._connection.answered(asks_on=bool(self.conn.trailing_data[0]))
