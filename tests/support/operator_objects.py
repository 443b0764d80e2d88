"""The Prometheus Operator's own kinds, as its custom resource definitions describe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

OPERATOR = "monitoring.coreos.com/v1"


def kept(manifest: Mapping[str, Any]) -> Any:
    """Return what the API server keeps of an object: it drops fields that it does not know.

    Raises ValueError for what it refuses, such as a duration that is none.
    """
    models = pytest.importorskip(
        "cloudcoil.models.prometheus_operator.v1", reason="the operator's models are not installed"
    )
    model = getattr(models, manifest["kind"]).model_validate(manifest)
    return model.model_dump(mode="json", by_alias=True, exclude_unset=True)
