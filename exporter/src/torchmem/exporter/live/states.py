"""The newest state of the node, in the encodings that clients ask for.

States and scrapes share collections: whoever asks within a second gets the same one, or within up
to MAX_PAUSE_SECONDS if a collection takes long.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import math
import time
from collections.abc import Awaitable, Callable
from functools import cached_property

from torchmem.exporter.live.history import NodeHistory
from torchmem.exporter.live.state import node_state
from torchmem.exporter.node_reading import NodeReading
from torchmem.node.published import Published
from torchmem.node.state import NodeState, encode
from torchmem.sample.sample import LIVE_STATES

_log = logging.getLogger(__name__)

MIN_SECONDS = 1.0
MAX_PAUSE_SECONDS = 5.0
COLLECTION_SHARE = 0.1
"""The largest share of the time that collections for clients of the live page take."""

HISTORY_PAUSE_SECONDS = 10.0
"""The shortest time between two points while no page is open; most come from scrapes."""
RANK_HISTORY_PAUSE_SECONDS = 20.0
"""How old the newest collection gets before one is made for the history alone, while a rank runs.

Prometheus usually scrapes more often, and then none is made."""
IDLE_HISTORY_PAUSE_SECONDS = 120.0
"""The same while no rank runs."""

GZIP_LEVEL = 1


class EncodedState:
    """The state document of one collection. Each encoding is made once, if it is asked for."""

    def __init__(self, found: NodeReading, state: NodeState) -> None:
        self.found, self._state = found, state

    @cached_property
    def json(self) -> bytes:
        """The document as JSON."""
        return encode(self._state)

    @cached_property
    def gzipped(self) -> bytes:
        """The document, compressed."""
        return gzip.compress(self.json, GZIP_LEVEL)


class States:
    """The newest state, and the history of all. `collect` runs a collection, or waits for one."""

    def __init__(
        self, collect: Callable[[], Awaitable[object]], found: Callable[[], NodeReading]
    ) -> None:
        self._collect, self._found = collect, found
        self._newest: EncodedState | None = None
        self._running: asyncio.Task[EncodedState] | None = None
        self._kept_at = -math.inf
        self.history = NodeHistory()
        self.pause_seconds = MIN_SECONDS
        """How old a state may be."""

    async def newest(self, max_age: float | None = None) -> EncodedState:
        """Return a state of at most `max_age` or `pause_seconds`; callers share it."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._refreshed(max_age or self.pause_seconds))
        # A client that goes away must not cancel the collection that others wait for.
        return await asyncio.shield(self._running)

    def note_collection(self) -> None:
        """Add what a collection has just found to the history. For the thread of the collection."""
        if time.monotonic() - self._kept_at < HISTORY_PAUSE_SECONDS:
            return
        try:
            self._newest = self._encoded(self._found())
        except Exception:  # noqa: BLE001 - a failure costs one point; it is logged
            _log.exception("adding to the history failed")

    async def keep_history(self) -> None:
        """Add to the history, forever, also without a scrape or an open page."""
        while True:
            await asyncio.sleep(max(HISTORY_PAUSE_SECONDS, self._seconds_until_due))
            if self._seconds_until_due > 0:  # a scrape has added a point meanwhile
                continue
            try:
                await self.newest(self.max_history_age)
            except Exception:  # noqa: BLE001 - a failure costs one point; it is logged
                _log.exception("adding to the history failed")

    @property
    def _seconds_until_due(self) -> float:
        return self._kept_at + self.max_history_age - time.monotonic()

    @property
    def max_history_age(self) -> float:
        """How old the newest collection gets, in seconds, before one is made for the history."""
        is_in_use = any(item.state in LIVE_STATES for item in self._found().published)
        return RANK_HISTORY_PAUSE_SECONDS if is_in_use else IDLE_HISTORY_PAUSE_SECONDS

    async def _refreshed(self, max_age: float) -> EncodedState:
        # Below zero, the clock was set back, and the state would stay the newest for that long.
        if not 0 <= time.time() - self._found().time < max_age:
            started = time.monotonic()
            await self._collect()
            pause = (time.monotonic() - started) / COLLECTION_SHARE
            self.pause_seconds = min(max(pause, MIN_SECONDS), MAX_PAUSE_SECONDS)
        found = self._found()
        if self._newest is None or self._newest.found is not found:
            self._newest = await asyncio.to_thread(self._encoded, found)
        return self._newest

    def _encoded(self, found: NodeReading) -> EncodedState:
        state = node_state(found)
        self._kept_at = time.monotonic()
        self.history.add(state)
        return EncodedState(found, state)


class RankIndex:
    """The processes that the newest collection has found, by their ids in URLs."""

    def __init__(self, found: Callable[[], NodeReading]) -> None:
        self._found = found
        self._indexed: NodeReading | None = None
        self._by_id: dict[str, Published] = {}

    def get(self, id_: str) -> Published | None:
        """Return a process, None if there is none with this id."""
        found = self._found()
        if found is not self._indexed:
            self._by_id = {item.id: item for item in found.published}
            self._indexed = found
        return self._by_id.get(id_)
