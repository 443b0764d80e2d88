"""The newest state of the node, in the encodings that clients ask for.

States and scrapes share collections: whoever asks within a second gets the same one, or within up
to MAX_PAUSE_SECONDS if a collection takes long.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import math
import time
import zlib
from collections.abc import Awaitable, Callable
from functools import cached_property, partial

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

GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
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

    @cached_property
    def event(self) -> bytes:
        """The document as one server-sent event."""
        return b"data: %b\n\n" % self.json

    @cached_property
    def deflated_event(self) -> bytes:
        """The event, deflated."""
        return deflated(self.event)


def deflated(data: bytes) -> bytes:
    """Return the data as DEFLATE blocks without a final block.

    They end at a byte and refer to nothing before them, so that the same ones can follow anything
    in the bodies of all clients, each of which begins with GZIP_HEADER.
    """
    deflate = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return deflate.compress(data) + deflate.flush(zlib.Z_FULL_FLUSH)


class States:
    """The newest state, and the history of all. `collect` runs a collection, or waits for one."""

    def __init__(
        self, collect: Callable[[], Awaitable[object]], found: Callable[[], NodeReading]
    ) -> None:
        self._collect, self._found = collect, found
        self._newest: EncodedState | None = None
        self._running: asyncio.Task[EncodedState] | None = None
        self._collection_seconds = 0.0
        self._kept_at = -math.inf
        self._postpone: Callable[[], object] | None = None
        self.history = NodeHistory()
        self.pause_seconds = MIN_SECONDS
        """How old a state may be, and how long a client should wait for the next one."""

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
        if self._postpone is not None:
            with contextlib.suppress(RuntimeError):  # the server has stopped meanwhile
                self._postpone()

    async def keep_history(self) -> None:
        """Add to the history, forever, also without a scrape or an open page."""
        loop, timer = asyncio.get_running_loop(), _Timer()
        arm = partial(self._arm, timer)
        # Each collection restarts the timer, so that it does not end between two scrapes.
        self._postpone = partial(loop.call_soon_threadsafe, arm)
        while True:
            arm()
            await timer.end()
            try:
                await self.newest(self.max_history_age)
            except Exception:  # noqa: BLE001 - a failure costs one point; it is logged
                _log.exception("adding to the history failed")

    def _arm(self, timer: _Timer) -> None:
        due = self._kept_at + self.max_history_age - time.monotonic()
        timer.start(max(HISTORY_PAUSE_SECONDS, due))

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
            self._collection_seconds = time.monotonic() - started
            pause = self._collection_seconds / COLLECTION_SHARE
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


class _Timer:
    """A timer that can be restarted while a coroutine waits for it. For the event loop."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None
        self._has_ended = asyncio.Event()

    def start(self, seconds: float) -> None:
        """Start the timer, or restart it if it runs: it ends after this many seconds."""
        if self._handle is not None:
            self._handle.cancel()
        self._has_ended.clear()
        self._handle = asyncio.get_running_loop().call_later(seconds, self._has_ended.set)

    async def end(self) -> None:
        """Wait until the timer ends."""
        await self._has_ended.wait()


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
