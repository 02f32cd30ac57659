"""`python -m tests.runs.benchmarks [--only a,b,...] [--seconds N] [--rounds N] [--output DIR]`, or `make bench`.

Starts its own broker on loopback, measures, prints tables, writes results.json, and leaves nothing running.
Exit code 1 when a run did not do its work; a missed goal is no error, it is printed.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the worker and every peer

from tests.runs.benchmarks import clients, costs, embedding, handover, partitions
from tests.runs.benchmarks.bench import Bench
from tests.runs.benchmarks.results import Results, describe
from tests.runs.benchmarks.workload import BenchmarkError

PARTS: Final = {
    "a": ("the embedder alone and the worker through Kafka", embedding.run),
    "b": ("the same job without a model, other clients", clients.run_without_model),
    "c": ("the same job with the model, as a user would write it", clients.run_with_model),
    "d": ("one scan of the cache", costs.scans),
    "e": ("restore", partitions.restores),
    "f": ("several worker processes without a model", costs.fleets),
    "g": ("memory and start", costs.footprints),
    "h": ("hand-over of partitions", handover.run),
    "j": ("many partitions on one worker", partitions.many),
}

ORDER: Final = "bfjheacgd"
"""The parts that let the broker work hardest come first: its compiler is done when the others look at single traces."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.runs.benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(ORDER), help="parts, by letter, in the order in which they are run: "
        + "; ".join(f"{letter} {title}" for letter, (title, _) in PARTS.items()))  # fmt: skip
    parser.add_argument("--seconds", type=float, default=10.0, help="rough length of one run of one row")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the rows take turns within each")
    parser.add_argument("--output", type=Path, help="directory for results.json (default: a new one)")
    given = parser.parse_args()
    letters = [letter.strip() for letter in given.only.split(",")]
    if unknown := set(letters) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}")
    output = given.output or Path(tempfile.mkdtemp(prefix="kp-bench-"))
    logs = output / "logs"
    logs.mkdir(parents=True, exist_ok=True)

    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # retries while a new topic gets its leaders
    results = Results(describe() | {"seconds": given.seconds, "rounds": given.rounds})
    for name, value in results.machine.items():
        print(f"{name}: {value}")
    bench = Bench(results, logs, given.seconds, given.rounds)
    failed = False
    began = time.monotonic()
    try:
        for letter in letters:
            title, run = PARTS[letter]
            print(f"\n{letter}) {title}", flush=True)
            try:
                run(bench)
            except (BenchmarkError, AssertionError) as error:
                failed = True
                print(f"part {letter} failed:\n{error}")
            results.show_part(letter)
            results.save(output / "results.json")
    finally:
        bench.stop_broker()
    results.machine["load average after"] = os.getloadavg()
    results.machine["took seconds"] = round(time.monotonic() - began)
    results.show_goals()
    results.save(output / "results.json")
    print(f"{output}/results.json; into docs/: python -m tests.runs.benchmarks.results {output}/results.json")
    print(f"load average {os.getloadavg()}, {results.machine['took seconds']} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
