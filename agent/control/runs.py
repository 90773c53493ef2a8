"""Where the agent is that only serves runs of one network namespace. Nothing else is here, for `run` starts quickly."""

from __future__ import annotations

from pathlib import Path
from typing import Final

RUNS_DIRECTORY: Final = Path("/run/namegate-runs")
RUNS_DEVICE: Final = "ng-runs"  # as `datapath.device` of a configuration


def own_network_namespace() -> int:
    """Its inode, by which network namespaces are told apart (namespaces(7))."""
    return Path("/proc/self/ns/net").stat().st_ino


def runs_directory(network_namespace: int) -> Path:
    return RUNS_DIRECTORY / str(network_namespace)


def runs_socket(network_namespace: int) -> Path:
    return runs_directory(network_namespace) / "control.sock"
