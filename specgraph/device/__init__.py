"""The interface between the core and a device, and how devices are found and chosen."""

from specgraph.device.capabilities import LOWERINGS, Capabilities, LoweringName, Rule, Support, no, quirk, yes
from specgraph.device.discovery import Backend, Discovered, Probe, discover, hookimpl
from specgraph.device.graph import Graph, VendorMessage
from specgraph.device.interface import (
    PLATFORM_API,
    Event,
    MemoryInfo,
    Platform,
    PlatformInfo,
    Progress,
    Stream,
    TaskGroup,
)
from specgraph.device.pool import GraphPool
from specgraph.device.selection import ENV_VAR, open_platform, select_platform

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
    "LoweringName",
    "MemoryInfo",
    "Platform",
    "PlatformInfo",
    "Probe",
    "Progress",
    "Rule",
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
    "yes",
]
