"""The interface between the drafting engine and a device, and how devices are found and chosen."""

from specgraph.platforms import trial
from specgraph.platforms.capabilities import (
    LOWERINGS,
    Capabilities,
    Level,
    LoweringName,
    Rule,
    Support,
    no,
    quirk,
    yes,
)
from specgraph.platforms.discovery import Discovered, discover
from specgraph.platforms.graph import Graph, VendorMessage
from specgraph.platforms.hookspecs import Backend, Probe, hookimpl
from specgraph.platforms.interface import (
    PLATFORM_API,
    Event,
    MemoryInfo,
    Platform,
    PlatformInfo,
    Stream,
    TaskGroup,
)
from specgraph.platforms.pool import GraphPool
from specgraph.platforms.selection import ENV_VAR, Selection, open_platform, select_platform

__all__ = [
    "ENV_VAR",
    "LOWERINGS",
    "PLATFORM_API",
    "Backend",
    "Capabilities",
    "Discovered",
    "Event",
    "Graph",
    "GraphPool",
    "Level",
    "LoweringName",
    "MemoryInfo",
    "Platform",
    "PlatformInfo",
    "Probe",
    "Rule",
    "Selection",
    "Stream",
    "Support",
    "TaskGroup",
    "VendorMessage",
    "discover",
    "hookimpl",
    "no",
    "open_platform",
    "quirk",
    "select_platform",
    "trial",
    "yes",
]
