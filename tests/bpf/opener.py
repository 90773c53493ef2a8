"""A process that opens the datapath, says which policy map it has, and waits to be killed: run by the tests.

python -m tests.bpf.opener PIN_DIRECTORY SETTINGS_JSON [take-over]
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from agent.datapath.datapath import Datapath, Settings

if __name__ == "__main__":
    _directory, _sizes, *_rest = sys.argv[1:]
    _datapath = Datapath.open(Settings(pin_directory=Path(_directory), **json.loads(_sizes)), take_over=bool(_rest))
    print(_datapath.policy_map_id, flush=True)
    signal.pause()
