"""The command behind scripts/cases."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

from tests.cases.datapath import every_judge
from tests.cases.runner import DIRECTORY, Outcome, read_decisions, run_file


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
            with every_judge() if path.stem == "datapath" else nullcontext():
                tally = run_file(path, decisions)
        except (OSError, ValueError) as error:
            print(f"cases: {error}", file=sys.stderr)
            return 2
        print("\n".join(tally.lines()), flush=True)
        failed += tally.count(Outcome.FAILED)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
