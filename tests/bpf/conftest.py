"""The scene of one test: a lab, and settings whose pins are this run's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.datapath import syscall
from agent.datapath.datapath import Settings, cleanup
from tests.bpf import lab as labs
from tests.bpf.lab import inside
from tests.bpf.scene import Scene


@pytest.fixture
def scene() -> Iterator[Scene]:
    number = os.getpid()
    settings = Settings(
        pin_directory=Path(f"/sys/fs/bpf/namegate-test-{number}"),
        ipcache_rows=1_024,
        policy_rows=1_024,
        flow_rows=1_024,
        fragment_rows=256,
        last_seen_rows=1_024,
    )
    with labs.lab() as lab:
        try:
            yield Scene(lab, settings)
        finally:
            with inside(lab.host):
                cleanup(settings)


@pytest.fixture
def tcx() -> None:
    """For a test of what clsact does not have. What both promise is tested with either."""
    try:
        syscall.tcx_programs(1, syscall.TCX_INGRESS)
    except OSError:
        pytest.skip("this kernel is older than TCX (Linux 6.6)")
