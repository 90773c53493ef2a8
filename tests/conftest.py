"""What holds for every test: root tests are skipped without root, never with it; Hypothesis prints how to repeat a failure."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# No deadline for one example: the machines that run this are shared, and a slow example is no finding.
settings.register_profile("namegate", deadline=None, print_blob=True)
settings.load_profile("namegate")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    needs_root = pytest.mark.skip(reason="needs root: sudo scripts/test")
    for item in items:
        if item.get_closest_marker("root") is not None:
            item.add_marker(needs_root)
