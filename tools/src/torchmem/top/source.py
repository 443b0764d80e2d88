"""Where the screen has its records from: an exporter, or without one the run directory."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torchmem.cli.exporter import SilentError, ask, ask_rank
from torchmem.cli.http import without_credentials
from torchmem.explain.chosen_thresholds import chosen
from torchmem.node.local import LocalRanks
from torchmem.node.state import NodeState, RankWhy
from torchmem.sample.errors import TorchmemError
from torchmem.top.view import RankKey


class ScreenSource:
    """The exporter at `url`; while nothing responds there, the ranks of `directory`, if given."""

    def __init__(self, url: str, directory: Path | None = None) -> None:
        self._url, self._directory = url, directory
        self._local: LocalRanks | None = None

    def node(self) -> NodeState:
        """Return the newest state. Raise AwayError."""
        self._local = None
        try:
            return ask(self._url)
        except SilentError:
            node = self._local_node(self._directory) if self._directory else None
            if node is None:
                raise
            return node

    def why(self, key: RankKey) -> RankWhy | None:
        """Return why the memory of a rank in that state is as it is; None without an answer."""
        return self._local.why(*key) if self._local else ask_rank(self._url, *key)

    def _local_node(self, directory: Path) -> NodeState | None:
        """Return the state of the run directory; None without a rank in it that can be read."""
        with suppress(TorchmemError):
            local = LocalRanks(directory, chosen())
            node = local.node()
            if any(gpu.ranks for gpu in node.gpus) or node.waiting:
                self._local = local
                whose = "your" if os.geteuid() else "the"
                url = without_credentials(self._url)
                text = f"No exporter at {url}: these are {whose} ranks in {directory}."
                return replace(node, missing=" ".join(filter(None, (text, node.missing))))
        return None
