"""The command line of scripts/bench."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from tests.bench import BENCHES, dns
from tests.bench.harness import ROUNDS_JUDGED_MIN, Figure, Result, as_text, figure_text, judge, machine


def main() -> int:
    if sys.argv[1:2] == ["dns"]:  # a command line and a table of its own
        return dns.main(sys.argv[2:])
    known = {bench.name: bench for bench in BENCHES}
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure contestants side by side: interleaved rounds, medians with ranges, ratios within one run.",
        epilog="examples: scripts/bench --list; scripts/bench wire --rounds 31 --json wire.json; sudo scripts/bench",
    )
    parser.add_argument("names", metavar="BENCH", nargs="*", help="which (default: all that can run here)")
    parser.add_argument("--list", action="store_true", help="what there is")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each race (default: 15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    arguments = parser.parse_args()
    if arguments.list:
        for bench in BENCHES:
            print(f"{bench.name:<12} {bench.question}{' (needs root)' if bench.needs_root else ''}")
        print(f"{'dns':<12} {dns.QUESTION} (needs root; only by name, see scripts/bench dns --help)")
        return 0
    if arguments.rounds < 1:
        parser.error("--rounds is at least 1")
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"there is no bench {unknown[0]!r}: there are {', '.join(known)}")
    chosen = [known[name] for name in arguments.names] or list(BENCHES)
    is_root = os.geteuid() == 0
    if arguments.names and not is_root and (blocked := [bench.name for bench in chosen if bench.needs_root]):
        print(f"bench: {blocked[0]} needs root: sudo scripts/bench {blocked[0]}", file=sys.stderr)
        return 2

    before = machine()
    print(f"{before['cpu']}, {before['processors']} processors, kernel {before['kernel']}, Python {before['python']}")
    print(f"load average {before['load_average']}; CPU time of this process, median (smallest to largest round)\n")
    results: dict[str, list[Result | Figure]] = {}
    over: list[str] = []
    for bench in chosen:
        if bench.needs_root and not is_root:
            print(f"{bench.name}: not run, needs root\n")
            continue
        with bench.races() as races:
            results[bench.name] = []
            for race in races:
                result = race if isinstance(race, Figure) else judge(race, arguments.rounds)
                results[bench.name].append(result)
                print(figure_text(result) if isinstance(result, Figure) else as_text(result), end="\n\n", flush=True)
                if result.is_over and arguments.rounds >= ROUNDS_JUDGED_MIN:
                    over.append(f"{bench.name}: {result.title}")
    if arguments.json:
        document = {
            "machine": before,
            "load_average_after": machine()["load_average"],
            "unit": "nanoseconds of CPU time",
            "benches": {name: [asdict(result) for result in found] for name, found in results.items()},
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    for title in over:
        print(f"over its bound: {title}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
