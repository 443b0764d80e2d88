"""The web configuration file that changes under the reader's eyes."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchmem.exporter.web.config import LiveConfig


class Edited(type(Path())):  # type: ignore[misc]  # what Path() gives depends on the system
    """A file that is written again right after each of the first reads."""

    edits: list[str]

    def read_bytes(self) -> bytes:
        """The content; the next one is there when it returns."""
        content = bytes(super().read_bytes())
        if self.edits:
            self.write_text(self.edits.pop(0))
        return content


def allowed(burst: int) -> str:
    """A configuration that is told by its number."""
    return f"rate_limit: {{interval: 1s, burst: {10**burst}}}\n"


@pytest.mark.parametrize("changes", [1, 2, 3])
@pytest.mark.parametrize("at_start", [True, False])
def test_change_while_it_is_read_is_not_missed(
    tmp_path: Path, changes: int, *, at_start: bool
) -> None:
    """However often a file changes just after it was read, in the end its last version is served."""
    file = Edited(tmp_path / "web.yml")
    file.edits = []
    file.write_text(allowed(0))
    edits = [allowed(number) for number in range(1, changes + 1)]
    if at_start:
        file.edits = edits
        live = LiveConfig(file)
    else:
        live = LiveConfig(file)
        file.write_text(allowed(5))
        file.edits = edits
    for _ in range(changes + 1):
        live.current()
    limit = live.current().rate_limit

    assert [] == edits
    assert limit is not None
    assert 10**changes == limit.burst
