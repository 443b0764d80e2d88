"""The training function of Ray Train's workers.

from torchmem.integrations.ray import instrument

def train_function(config):
    with instrument():
        ...
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import ray.train

from torchmem import sdk

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Ray's own names for runs without one end with the time (`RunConfig`, 2.60), and a run keeps its
# name from launch to launch.
_TIME = re.compile(r"[-_]\d{4}-\d{2}-\d{2}_\d{2}-\d{2}-\d{2}\w*$")


def instrument(**settings: Unpack[sdk.SettingsKeywords]) -> sdk.Session:
    """Monitor this worker under the name in `RunConfig(name=…)`.

    Takes the settings of `sdk.instrument`. Ray ends its workers with a signal, so use the session
    as a context manager: then the state is `exited`, or `failed` if the function raises.
    """
    session = sdk.instrument(**settings)
    with session.errors.suppress("setup"):
        session.rename(_TIME.sub("", ray.train.get_context().get_experiment_name()))
    return session
