"""Run disasters: `python -m tests.runs.disasters [NAME ...]`, all without a name. Exit code 1: something is wrong."""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.runs.disasters import clock, disk, mirror, partition
from tests.runs.disasters.scene import MissingError, Verdict
from tests.support import chaos
from tests.support.processes import interrupt_on_signals

DISASTERS: Final[dict[str, Callable[[Path, int], Verdict]]] = {
    "disk": disk.run_alone,
    "disk-of-three": disk.run_of_three,
    "partition": partition.run,
    "mirror": mirror.run,
    "clock": clock.run,
    "assemble-clock": clock.assemble,
}


def run(name: str, work: Path, seed: int) -> Verdict | str:
    """Run one disaster; return its verdict, or what it lacks."""
    print(f"--- {name} (seed {seed}, files in {work})", flush=True)
    try:
        return DISASTERS[name](work, seed)
    except MissingError as error:
        return str(error)
    except AssertionError as error:
        return Verdict(name, wrong=[str(error)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.runs.disasters", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(DISASTERS)} [all]")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="[random]")
    parser.add_argument("--work", type=Path, help="directory for logs and data, kept [temporary]")
    options = parser.parse_args()
    if unknown := set(options.names) - set(DISASTERS):
        parser.error(f"no disaster is named {', '.join(sorted(unknown))}; there are {', '.join(DISASTERS)}")
    interrupt_on_signals()
    chaos.quiet_clients()
    ends: list[tuple[str, float, Verdict | str]] = []
    with tempfile.TemporaryDirectory(prefix="kp-disasters-") as temporary:
        for name in options.names or DISASTERS:
            began = time.monotonic()
            work = ((options.work or Path(temporary)) / f"{name}-{os.getpid()}").resolve()
            try:
                end = run(name, work, options.seed)
            except KeyboardInterrupt:
                print(f"\ninterrupted in {name}; everything it started is stopped", flush=True)
                return 130
            ends.append((name, time.monotonic() - began, end))
            print(f"{end if isinstance(end, Verdict) else f'{name}: NOT RUN: {end}'}\n", flush=True)
    for name, seconds, end in ends:
        text = f"not run: {end}" if isinstance(end, str) else "WRONG" if end.wrong else "all right"
        print(f"{name:16s} {seconds:5.0f} s  {text}")
    return 0 if all(isinstance(end, Verdict) and not end.wrong for *_, end in ends) else 1


if __name__ == "__main__":
    sys.exit(main())
