"""What holds for every test: root tests are skipped without root, never with it; Hypothesis prints how to repeat a failure;
what tests start ignores no signal, whoever runs them (nohup and a shell's background ignore some, and children inherit that).
"""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

# No deadline for one example: the machines that run this are shared, and a slow example is no finding.
settings.register_profile("namegate", deadline=None, print_blob=True)
settings.load_profile("namegate")

for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)  # still nothing here; what is started has the default again


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    needs_root = pytest.mark.skip(reason="needs root: sudo scripts/test")
    for item in items:
        if item.get_closest_marker("root") is not None:
            item.add_marker(needs_root)
