"""The command behind scripts/fuzz: chunks of the stream, judged by as many processes as there are processors.

A chunk depends on the seed and its number alone, so the same seed gives the same messages whatever the number of processes, and
a run that ends by time is the beginning of a longer one.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import secrets
import signal
import sys
import time
import traceback
import zlib
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from types import FrameType

from tests.fuzz.corpus import exchanges
from tests.fuzz.judging import Judge
from tests.fuzz.making import Message, messages

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
CHUNK = 2_000
# A message takes a tenth of a millisecond; processor time, so that a busy machine is no finding.
CHUNK_S_MAX = 60.0


@dataclass(slots=True)
class Outcome:
    """Of one chunk. digest: of its messages. found: the message that broke a promise, and how."""

    chunk: int
    judged: int = 0
    digest: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    found: tuple[Message, str] | None = None


def judge_chunk(seed: int, chunk: int, number: int, judge: Judge | None = None) -> Outcome:
    """Up to the first finding. judge: for tests, with something broken in it."""
    outcome = Outcome(chunk)
    judge = judge or Judge()
    message = Message(b"", None)
    signal.signal(signal.SIGVTALRM, _takes_too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, CHUNK_S_MAX)
    try:
        for message in messages(seed, chunk, number):
            outcome.digest = zlib.crc32(message.reply or b"", zlib.crc32(message.query, outcome.digest))
            judge.judge(message)
            outcome.judged += 1
    except Exception:  # noqa: BLE001  whatever comes out of the code under test is what is looked for
        outcome.found = message, traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    outcome.counts = judge.counts
    return outcome


def _takes_too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("one message, or its chunk, takes for ever")


def fuzz(seed: int, number: int | None, seconds: float | None, jobs: int) -> Outcome:
    """All chunks together, until the number is reached, the time is over, or something is found."""
    ends_at = time.monotonic() + seconds if seconds is not None else None
    total = Outcome(0)
    running: set[Future[Outcome]] = set()
    begun = 0
    exchanges()  # once: the processes inherit it
    with ProcessPoolExecutor(jobs, initializer=_end_with_parent) as pool:
        while True:
            while len(running) < 2 * jobs and total.found is None:
                size = CHUNK if number is None else min(CHUNK, number - begun * CHUNK)
                if size <= 0 or (ends_at is not None and time.monotonic() >= ends_at):
                    break
                running.add(pool.submit(judge_chunk, seed, begun, size))
                begun += 1
            if not running:
                return total
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                outcome = one.result()
                total.judged += outcome.judged
                total.digest ^= zlib.crc32(b"%d/%d" % (outcome.chunk, outcome.digest))
                total.counts += outcome.counts
                if outcome.found is not None and (total.found is None or outcome.chunk < total.chunk):
                    total.chunk, total.found = outcome.chunk, outcome.found


def _end_with_parent() -> None:
    """Also when that is killed: the processes of a pool would wait for work for ever."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def judge_one(query: str, reply: str | None) -> int:
    message = Message(bytes.fromhex(query), None if reply is None else bytes.fromhex(reply))
    try:
        judge = Judge()
        judge.judge(message)
    except Exception:  # noqa: BLE001  as above
        print(traceback.format_exc())
        return 1
    print("nothing found: " + ", ".join(judge.counts))
    return 0


def main(arguments: list[str]) -> int:
    """Exit code 1: something was found."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description="Messages of all sorts through the DNS walker and judge.")
    parser.add_argument("what", choices=["dns"])
    parser.add_argument("--messages", type=int, help="how many (10,000,000 without --seconds)")
    parser.add_argument("--seconds", type=float, help="for how long")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--query", help="judge this one message (hex)")
    parser.add_argument("--reply", help="and this reply to it (hex)")
    chosen = parser.parse_args(arguments)
    if chosen.query is not None:
        return judge_one(chosen.query, chosen.reply)
    number = 10_000_000 if chosen.messages is None and chosen.seconds is None else chosen.messages
    print(f"seed {chosen.seed}", flush=True)
    begun = time.monotonic()
    total = fuzz(chosen.seed, number, chosen.seconds, chosen.jobs)
    print(f"{total.judged} messages in {time.monotonic() - begun:.0f} s by {chosen.jobs} processes, digest {total.digest:08x}")
    for what, count in sorted(total.counts.items()):
        print(f"  {count:>10} {what}")
    if total.found is None:
        return 0
    message, how = total.found
    reply = "" if message.reply is None else f" --reply {message.reply.hex()}"
    print(f"FOUND in chunk {total.chunk}:\n{how}\nagain with: scripts/fuzz dns --query {message.query.hex()}{reply}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
