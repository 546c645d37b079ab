"""Registry of the scheduling policies by the name that `EngineConfig.policy` takes.

A policy is one class in one file and one line here. The choices and the help of the configuration, admission and the
token budget follow from the attributes of the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from triolet.core.scheduling.policies.base import WaitingQueue
from triolet.core.scheduling.policies.fair import FairQueue
from triolet.core.scheduling.policies.priority import PriorityQueue

POLICIES: Final[Mapping[str, type[WaitingQueue]]] = MappingProxyType(
    {"fcfs": WaitingQueue, "priority": PriorityQueue, "fair": FairQueue}  # the first is the default
)
