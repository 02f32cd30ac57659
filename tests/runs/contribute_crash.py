"""`make contribute-crash`: kills of `contribute` and restarts of a faulty registry, on the embedded broker, judged."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.support.contribute import Trial, crash_run
from worker.lab.broker.embedded_kafka import EmbeddedKafka


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--faults", type=float, default=0.05)
    parser.add_argument("--seconds", type=float, default=180, help="how long kills and restarts go on")
    parser.add_argument("--store", choices=["with", "without", "both"], default="both", help="the idempotency store")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    failed = False
    with EmbeddedKafka() as kafka:
        for idempotency in {"with": [True], "without": [False], "both": [True, False]}[given.store]:
            trial = Trial(
                given.traces, given.kills, given.restarts, given.processes, idempotency=idempotency,
                faults=given.faults, seconds=given.seconds, patience=3600,
            )  # fmt: skip
            with tempfile.TemporaryDirectory() as folder:
                problems = crash_run(kafka.bootstrap_servers, Path(folder), given.seed, trial)
            print(trial, problems or "no problem", sep="\n", flush=True)
            failed |= bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
