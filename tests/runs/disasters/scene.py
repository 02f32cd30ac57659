"""What all disasters share: workers under load, a timeline of what they do, and a verdict at the end."""

import contextlib
import http.client
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from tests.support import chaos, oracle
from tests.support.chaos import Fleet, Load, settings, traces, wait_settled
from tests.support.crash_worker import hash_vector
from tests.support.kafka_fixtures import create_topics, wait_until

PARTITIONS: Final = 4
PATIENCE_S: Final = 600.0


class MissingError(Exception):
    """Something that a disaster needs is not on this machine: the message says how to install it."""


@dataclass
class Verdict:
    """The end of a disaster: what was seen, and what is wrong (nothing: all right)."""

    name: str
    seen: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def expect(self, right: bool, text: str) -> None:
        """Note a claim of the page, as seen or as wrong."""
        (self.seen if right else self.wrong).append(text)

    def __str__(self) -> str:
        rows = [f"  {text}" for text in self.seen] + [f"  WRONG: {text}" for text in self.wrong]
        return "\n".join([f"{self.name}: {'WRONG' if self.wrong else 'all right'}", *rows])


class Eye(threading.Thread):
    """Looks at the workers a few times a second: readiness, health and progress, each change on the timeline."""

    def __init__(self, fleet: Fleet, say: Callable[[str], object]) -> None:
        super().__init__(name="eye", daemon=True)
        self.longest_stall = 0.0
        self.unhealthy = 0
        """How often /healthz said no."""
        self.most_lag_seconds = 0.0
        self.loaded = False
        """Whether there is something to commit."""
        self._fleet, self._say = fleet, say
        self._states: dict[int, str] = {}
        self._committed: dict[int, float] = {}
        """By process, what it has committed."""
        self._moved_at = time.monotonic()
        self._exits = 0
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.25):
            self._look()

    def reset(self) -> None:
        """Forget the stalls until now."""
        self.longest_stall, self._moved_at = 0.0, time.monotonic()

    def finish(self) -> None:
        self._over.set()
        if self.is_alive():
            self.join()

    def _look(self) -> None:
        for event in self._fleet.exits[self._exits :]:
            self._exits += 1
            self._say(f"worker {event.slot} ended with {event.code} after {event.lived:.0f} s")
        moved = False
        for slot in self._fleet.running():
            state = "away"
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                healthy, ready = slot.process.get("/healthz")[0] == 200, slot.process.get("/readyz")[0] == 200
                self.unhealthy += not healthy
                state = "ready" if ready else "not ready"
                state += "" if healthy else ", not healthy"
                metrics = slot.process.metrics()
                done = sum(
                    v for name, v in metrics.items() if name.startswith(("kp_traces_total", "kp_dead_letters_t"))
                )
                moved |= done > self._committed.get(slot.process.pid, 0.0)
                self._committed[slot.process.pid] = done
                lags = (v for name, v in metrics.items() if name.startswith("kp_consumer_lag_seconds"))
                self.most_lag_seconds = max(self.most_lag_seconds, *lags, 0.0)
            if self._states.get(slot.number) != state:
                self._states[slot.number] = state
                self._say(f"worker {slot.number} is {state}")
        now = time.monotonic()
        if self.loaded:
            self.longest_stall = max(self.longest_stall, now - self._moved_at)
        if moved or not self.loaded:
            self._moved_at = now


class Scene:
    """Workers of one group with topics of their own, under load; they end with the block.

    `env`: further variables of the workers.
    """

    def __init__(
        self,
        bootstrap: str,
        logs: Path,
        name: str,
        *,
        seed: int,
        rate: float = 15.0,
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._began = time.monotonic()
        self.verdict = Verdict(name)
        self.bootstrap = bootstrap
        self.env = settings(bootstrap, **{"KP_CACHE_MAX_ELEMENTS": "200", **env})
        self.group, self.source = self.env["KP_GROUP_ID"], self.env["KP_SOURCE_TOPIC"]
        logs.mkdir(parents=True, exist_ok=True)
        self.fleet = Fleet(self.env, logs)
        self.eye = Eye(self.fleet, self.say)
        records = (record._replace(timestamp_ms=None) for record in traces(seed, PARTITIONS))  # dated as sent
        self.load = Load(bootstrap, self.source, records, 0, rate, open_end=True, timeout_s=600)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.eye.finish()
        self.fleet.__exit__(None, None, None)

    def say(self, text: str) -> None:
        """Print what happened, with its second."""
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)

    def begin(self) -> None:
        """Create the topics, start two workers and load, and return when all are at work."""
        create_topics(self.bootstrap, {self.source: PARTITIONS})
        for _ in range(2):
            self.fleet.add()
        self.eye.start()
        self.wait(self.fleet.all_ready, "the workers are ready")
        self.load.start()
        self.eye.loaded = True
        time.sleep(5)
        self.eye.reset()

    def wait(self, condition: Callable[[], bool], text: str, timeout: float = PATIENCE_S) -> None:
        """Wait, and say when it came true. Raises AssertionError when it is late (seconds)."""
        if not wait_until(condition, timeout):
            raise AssertionError(f"not in {timeout:.0f} s: {text}\n{self.fleet.tails()}")
        self.say(text)

    def alive_again(self, what: str) -> None:
        """Wait until all workers are ready."""
        self.wait(self.fleet.all_ready, f"{what}: all workers are ready")
        self.say(f"{what}: longest time without a commit {self.eye.longest_stall:.1f} s")

    def logged(self, pattern: str) -> list[str]:
        """Return the log lines of all workers that match."""
        lines = [line for path in sorted(self.fleet.logs.glob("*.log")) for line in path.read_text().splitlines()]
        return [line for line in lines if re.search(pattern, line)]

    def finish(self, *, exits: Sequence[int] = ()) -> Verdict:
        """End the load, wait until all is committed, stop the workers, and judge all topics.

        `exits`: codes with which workers may have ended unasked.
        """
        v = self.verdict
        self.eye.loaded = False
        ends = self.load.finish(PATIENCE_S)
        v.expect(wait_settled(self.bootstrap, self.env, ends, PATIENCE_S), "everything was committed in time")
        codes = self.fleet.stop_all()
        v.expect(codes == [0] * len(codes), f"workers stopped with {codes}")
        self.eye.finish()
        report = oracle.check(self.bootstrap, self.env, hash_vector)
        v.expect(not report.problems(), f"judged by the oracle: {report} {'; '.join(report.problems())}")
        sent = sum(ends.values())
        v.expect(report.source == sent, f"{report.source} traces on the topic, {sent} sent")
        unasked = Counter(event.code for event in self.fleet.unexpected())
        v.expect(set(unasked) <= set(exits), f"exits that nobody asked for, by code: {dict(unasked)}")
        v.expect(self.eye.unhealthy == 0, f"/healthz said no {self.eye.unhealthy} times")
        v.seen.append(f"longest time without a commit: {self.eye.longest_stall:.1f} s")
        v.seen.append(f"greatest kp_consumer_lag_seconds: {self.eye.most_lag_seconds:.1f}")
        v.seen.append("the workers' logs: " + chaos.log_report(self.fleet.logs).replace("\n", "\n    "))
        return v
