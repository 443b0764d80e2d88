"""A what-if answer as JSON; its shape is described in docs/whatif.md."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from torchmem.simulator.whatif.result import Moment, Outcome, WhatIf

SCHEMA = 1


def document(result: WhatIf) -> str:
    """One line of JSON."""
    return json.dumps({"schema": SCHEMA} | whatif_values(result), ensure_ascii=True) + "\n"


def whatif_values(result: WhatIf) -> dict[str, Any]:
    """The fields of `WhatIf` with what they imply, the timelines as one list for each column."""
    values: dict[str, Any] = asdict(result)
    values["fidelity"] |= {"share": result.fidelity.share, "trusted": result.fidelity.trusted}
    values["outcomes"] = [_outcome(outcome) for outcome in result.outcomes]
    return values


def _outcome(outcome: Outcome) -> dict[str, Any]:
    if outcome.refused is not None:
        return {"name": outcome.name, "conf": outcome.conf, "refused": outcome.refused}
    columns = {column.name: [getattr(moment, column.name) for moment in outcome.timeline] for column in fields(Moment)}
    return asdict(outcome) | {"sufficient": outcome.sufficient, "timeline": columns}
