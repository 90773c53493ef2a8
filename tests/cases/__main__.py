"""The command behind scripts/cases."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

from tests.cases.datapath import every_judge
from tests.cases.dnsproxy import over_sockets
from tests.cases.runner import DIRECTORY, Outcome, read_decisions, run_file

# What the cases of a file are judged in.
_SETTINGS: Final[dict[str, Callable[[], AbstractContextManager[None]]]] = {"datapath": every_judge, "dnsproxy": over_sockets}


def main(arguments: list[str]) -> int:
    """Exit code 0: nothing failed; 1: something did; 2: there is nothing to run."""
    directory = Path(arguments[0]) if arguments else DIRECTORY
    paths = sorted(directory.glob("*.json"))
    if len(arguments) > 1 or not paths:
        print(f"cases: no case files (*.json) in {directory}: scripts/cases DIR", file=sys.stderr)
        return 2
    decisions, failed = read_decisions(), 0
    for path in paths:
        try:
            with _SETTINGS.get(path.stem, nullcontext)():
                tally = run_file(path, decisions)
        except (OSError, ValueError) as error:
            print(f"cases: {error}", file=sys.stderr)
            return 2
        print("\n".join(tally.lines()), flush=True)
        failed += tally.count(Outcome.FAILED)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
