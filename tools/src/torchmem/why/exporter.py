"""The records of an exporter."""

from __future__ import annotations

from torchmem.cli.exporter import AwayError, ask, ask_rank
from torchmem.cli.http import without_credentials
from torchmem.node.state import NodeState, RankWhy
from torchmem.sample.errors import TorchmemError, UsageError
from torchmem.top.start import START
from torchmem.why.source import Explanation, FoundRank, OomRow, SnapshotFile


class ExporterNode:
    """The ranks that an exporter knows. It has no files."""

    elsewhere = "name another exporter with --exporter"

    def __init__(self, url: str) -> None:
        self._url = url
        self.name = without_credentials(url)

    def node(self) -> NodeState:
        """Return the state of the node. Raise TorchmemError if the exporter does not respond."""
        try:
            return ask(self._url)
        except AwayError as error:
            raise TorchmemError(f"{self.name} {error}. {START}") from None

    def why(self, found: FoundRank) -> RankWhy:
        """Return why the memory of a rank is as it is. Raise TorchmemError without an answer."""
        why = ask_rank(self._url, found.gpu.uuid, found.rank.id)
        if why is None:
            raise TorchmemError(f"{self.name} does not explain {found}: try again.")
        return why

    def recordings(self, found: FoundRank) -> tuple[SnapshotFile, ...]:  # noqa: ARG002 - as a source
        """Return nothing."""
        return ()

    def reports(self, limit: int | None) -> tuple[OomRow, ...]:  # noqa: ARG002 - as a source
        """Return nothing: the newest OutOfMemoryError of each rank is in `node`."""
        return ()

    def explain(self, file: str) -> Explanation:  # noqa: ARG002 - as a source
        """Raise UsageError."""
        raise UsageError("an exporter shows no files: pass `run` and `rank` instead of `file`.")

    def rank_page(self, *_: object) -> None:
        """Return nothing: the exporter has a page of its own."""

    def oom_page(self, _: object) -> None:
        """Return nothing, likewise."""
