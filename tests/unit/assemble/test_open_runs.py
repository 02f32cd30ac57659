"""When runs close, what is remembered of them, and that a restart decides the same."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from worker.assemble import open_runs
from worker.assemble.open_runs import (
    ClosedRun,
    Effects,
    HeldBytes,
    Mark,
    OpenRuns,
    Part,
    Remembered,
    closed_key,
    encode,
    open_key,
)

A, B = ("otlp_spans", 0), ("otlp_spans", 1)
GRACE, GAP, MEMORY = 60_000, 900_000, 86_400_000


def runs(sources: Sequence[tuple[str, int]] = (A,), held: HeldBytes | None = None, **durations: int) -> OpenRuns:
    times = {"grace_ms": GRACE, "gap_ms": GAP, "memory_ms": MEMORY, **durations}
    return OpenRuns(sources, lambda contents: b"root" in contents, held=held or HeldBytes(), **times)


def part(time_ms: int, content: bytes, size: int = 10) -> Part:
    return Part(time_ms, *A, 0, size, content)


def active(time_ms: int | None, place: tuple[str, int] = A) -> Mark:
    return Mark(*place, time_ms)


def idle(time_ms: int | None, read_ms: int, waited_ms: int, place: tuple[str, int] = A) -> Mark:
    return Mark(*place, time_ms, read_ms, waited_ms)


class Stand:
    """Open runs with their state as a topic would keep it, and all that was closed."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.runs = runs(**options)
        self.state: dict[bytes, bytes] = {}
        self.closed: list[ClosedRun] = []
        self.late: list[str] = []

    def do(self, *steps: tuple[str, Part] | Mark) -> Stand:
        for step in steps:
            while True:
                effects = Effects()
                if isinstance(step, Mark):
                    done = self.runs.mark(step, effects)
                else:
                    self.runs.add_part(*step, effects)
                    done = True
                self.keep(effects)
                if done:
                    break
        return self

    def keep(self, effects: Effects) -> None:
        key, value = self.runs.times()
        for name, row in {**effects.rows, key: value}.items():
            if row is None:
                self.state.pop(name, None)
            else:
                self.state[name] = row
        self.closed += effects.closed
        self.late += [trace_id for trace_id, _ in effects.late]

    def restart(self) -> Stand:
        self.runs = runs(**self.options)
        assert self.runs.restore(self.state.items()) == []
        return self

    def causes(self) -> list[tuple[str, str]]:
        return [(run.trace_id, run.cause) for run in self.closed]


DAY = 86_400_000

Steps = list[tuple[list[tuple[str, Part] | Mark], list[tuple[str, str]]]]
"""Inputs, and the runs that are closed after them."""

CASES: dict[str, tuple[tuple[tuple[str, int], ...], Steps]] = {
    "a run closes a grace period after its last part if its root has ended": ((A,), [
        ([("aa", part(1000, b"child")), ("aa", part(2000, b"root")), active(2000 + GRACE - 1)], []),
        ([active(2000 + GRACE)], [("aa", "root_ended")]),
    ]),
    "a run without its root closes after the gap": ((A,), [
        ([("aa", part(1000, b"child")), active(1000 + GAP - 1)], []),
        ([active(1000 + GAP)], [("aa", "gap")]),
    ]),
    "a further part begins the wait anew, and may be the root": ((A,), [
        ([("aa", part(1000, b"child")), active(500_000), ("aa", part(500_000, b"more")), active(1000 + GAP)], []),
        ([("aa", part(1000 + GAP, b"root")), active(1000 + GAP + GRACE)], [("aa", "root_ended")]),
    ]),
    "one jump of the time over both waits closes by the gap, in the order of the deadlines": ((A,), [
        ([("aa", part(1000, b"child")), ("bb", part(1000, b"root")), active(10 * GAP)],
         [("bb", "root_ended"), ("aa", "gap")]),
    ]),
    "the time is that of the slowest partition; while nothing is known of one, there is none": ((A, B), [
        ([("aa", part(0, b"root")), active(10 * GAP)], []),
        ([active(GRACE - 1, B)], []),
        ([active(GRACE, B)], [("aa", "root_ended")]),
    ]),
    "where all are idle, the time goes on by the wait: a clock that is a day ahead closes nothing early": ((A, B), [
        ([("aa", part(1000, b"root")), active(1000), idle(None, DAY, 0, B), idle(1000, DAY, 0),
          idle(None, DAY + GRACE - 1, GRACE - 1, B), idle(1000, DAY + GRACE - 1, GRACE - 1)], []),
        ([idle(1000, DAY + GRACE, GRACE), idle(None, DAY + GRACE, GRACE, B)], [("aa", "root_ended")]),
    ]),
    "without any time nothing closes": ((A,), [
        ([("aa", part(1000, b"root")), active(None), idle(None, 10 * GAP, 10 * GAP)], []),
    ]),
    "time never goes back, so a part counts as of the time reached": ((A,), [
        ([active(70_000), active(50_000), ("aa", part(1000, b"root")), active(70_000 + GRACE - 1)], []),
        ([active(70_000 + GRACE)], [("aa", "root_ended")]),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_when_runs_close(case: str) -> None:
    sources, steps = CASES[case]
    stand = Stand(sources=sources)
    for inputs, closed in steps:
        assert stand.do(*inputs).causes() == closed


def test_what_comes_to_a_closed_run_is_late_until_it_is_forgotten() -> None:
    stand = Stand().do(("aa", part(0, b"root")), active(GRACE), ("aa", part(GRACE, b"more")))
    assert stand.late == ["aa"]
    assert len(stand.runs) == 0
    assert stand.runs.remembered == {"aa": GRACE}
    stand.do(active(GRACE + MEMORY - 1), ("aa", part(GRACE, b"more")))
    assert stand.late == ["aa", "aa"]
    stand.do(active(GRACE + MEMORY), ("aa", part(GRACE + MEMORY, b"root")))
    assert stand.late == ["aa", "aa"]
    assert len(stand.runs) == 1
    assert closed_key("aa") not in stand.state


def test_equal_parts_count_once() -> None:
    stand = Stand().do(("aa", part(0, b"child")), ("aa", part(5000, b"child")), ("aa", part(2000, b"root")))
    stand.do(active(2000 + GRACE))
    assert stand.closed == [ClosedRun("aa", "root_ended", {b"child": 10, b"root": 10}, 2000)]
    effects = Effects()
    again = Stand().do(("aa", part(0, b"child")))
    again.runs.add_part("aa", part(0, b"child"), effects)
    assert (effects.repeated, effects.rows) == (1, {})


YEAR = 365 * 86_400_000


@pytest.mark.parametrize("clock", [-YEAR, -1, 0, YEAR])
def test_an_idle_partition_holds_the_others_back_to_what_they_had_reached_at_its_mark_before(clock: int) -> None:
    """Whatever its owner's clock says: if that dies, the time must not pass what nobody reads."""
    now = YEAR + clock + 1
    stand = Stand(sources=(A, B)).do(active(50_000), idle(None, now, 1000, B), active(70_000))
    assert stand.runs.time_ms is None  # nothing is known of B
    stand.do(idle(None, now + 5000, 6000, B), active(80_000))
    assert stand.runs.time_ms == 50_000
    stand.restart().do(idle(None, now + 10_000, 11_000, B), active(10 * GAP))
    assert stand.runs.time_ms == 70_000


def test_a_mark_that_is_read_twice_because_a_batch_was_full_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_runs, "MAX_CLOSED", 1)
    stand = Stand(sources=(A, B)).do(("aa", part(1, b"root")), ("bb", part(2, b"root")), active(GAP))
    stand.do(idle(1, 1, 1000, B), idle(1, 1, 2000, B), active(2 * GAP))
    assert len(stand.causes()) == 2
    assert stand.runs.time_ms == GAP


def test_marks_of_a_topic_that_is_not_read_any_more_do_not_count() -> None:
    stand = Stand().do(active(1, ("old", 0)), active(70_000))
    assert stand.runs.time_ms == 70_000
    stand.runs = runs((A, B))
    stand.runs.restore(stand.state.items())
    assert stand.do(active(80_000)).runs.time_ms == 70_000  # B has no mark yet
    stand.runs = runs((B,))
    stand.runs.restore(stand.state.items())
    assert stand.do(active(90_000, B)).runs.time_ms == 90_000


def test_a_run_with_too_much_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand().do(("aa", part(0, b"1", open_runs.MAX_RUN_BYTES)), ("bb", part(0, b"2")))
    assert stand.causes() == []
    assert stand.do(("aa", part(0, b"3", 1))).causes() == [("aa", "too_large")]
    monkeypatch.setattr(open_runs, "MAX_RUN_PARTS", 3)
    assert stand.do(("bb", part(0, b"4")), ("bb", part(0, b"5"))).causes()[1:] == [("bb", "too_large")]
    assert stand.do(("aa", part(0, b"6"))).late == ["aa"]


def test_the_oldest_runs_are_closed_where_all_need_too_much_memory() -> None:
    held = HeldBytes()
    stand = Stand(held=held).do(*((f"{number:02x}", part(number, bytes(1000))) for number in range(10)))
    assert held.total == stand.runs.held_bytes > 10_000
    effects = Effects()
    stand.runs.shed(held.total - 2500, effects)
    assert [(run.trace_id, run.cause) for run in effects.closed] == [("00", "memory"), ("01", "memory")]
    assert held.total == stand.runs.held_bytes


def test_the_oldest_ids_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_runs, "MAX_REMEMBERED", 2)
    stand = Stand().do(*((f"{number:02x}", part(number, b"root")) for number in range(4)), active(10 * GAP))
    assert list(stand.runs.remembered) == ["02", "03"]
    assert {key for key in stand.state if key.startswith(b"closed")} == {closed_key("02"), closed_key("03")}


def test_many_runs_are_closed_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_runs, "MAX_CLOSED", 3)
    stand = Stand().do(*((f"{number:02x}", part(0, b"root")) for number in range(8)))
    batches = []
    while True:
        effects = Effects()
        done = stand.runs.mark(active(GRACE), effects)
        batches.append(len(effects.closed))
        stand.keep(effects)
        if done:
            break
        stand.restart()  # between two batches
    assert batches == [3, 3, 2]
    assert [run.trace_id for run in stand.closed] == [f"{number:02x}" for number in range(8)]


def test_a_restart_at_any_step_decides_the_same(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        steps: list[tuple[str, Part] | Mark] = []
        clock = {A: 0, B: 0}
        for number in range(rng.randint(5, 60)):
            place = rng.choice((A, B))
            clock[place] += rng.choice((0, 1000, 30_000, 70_000, 500_000))
            if rng.random() < 0.5:
                content = b"root" if rng.random() < 0.3 else b"%d" % rng.choice((number, 1))
                steps.append((f"{rng.randrange(8):02x}", part(clock[place], content)))
            elif rng.random() < 0.5:
                steps.append(active(clock[place], place))
            else:
                read = clock[place] + rng.choice((0, 5000, 100_000))
                steps.append(idle(clock[place], read, rng.choice((0, 5000, 60_000, 10**6)), place))
        steady = Stand(sources=(A, B), memory_ms=10**6).do(*steps)
        restarted = Stand(sources=(A, B), memory_ms=10**6)
        for step in steps:
            restarted.do(step)
            if rng.random() < 0.4:
                restarted.restart()
        assert restarted.closed == steady.closed
        assert restarted.late == steady.late
        assert restarted.state == steady.state


def test_damaged_state_is_skipped_and_told() -> None:
    stand = Stand().do(("aa", part(0, b"root")), ("bb", part(0, b"root")))
    damaged = {
        open_key("aa", 0): b"\xff",
        b"closed:zz": encode(Remembered(1)),
        b"other": encode(Remembered(1)),
        open_key("cc", 1): encode(Remembered(1)),
        **{key: value for key, value in stand.state.items() if key != open_key("aa", 0)},
    }
    again = runs()
    problems = again.restore(damaged.items())
    assert len(problems) == 4
    assert len(again) == 1
    assert again.restore([(b"closed:aa", encode(Remembered(1)))]) == []


def test_a_backlog_of_fifty_thousand_small_runs_takes_linear_time() -> None:
    held, effects = HeldBytes(), Effects()
    many = runs(held=held)
    began = time.process_time()
    for number in range(50_000):
        many.add_part(f"{number:04x}", part(number, b"root"), effects)
    assert held.total == many.held_bytes > 50_000 * open_runs.RUN_OVERHEAD
    while not many.mark(active(10 * GAP), Effects()):
        pass
    assert time.process_time() - began < 60
    assert (len(many), many.held_bytes, held.total) == (0, 0, 0)


def test_a_thousand_open_runs_cost_the_same_for_each_part(seed: int) -> None:
    """The root is looked for once after each pause, not with each part."""
    asked = 0

    def has_root(contents: Iterable[bytes]) -> bool:
        nonlocal asked
        asked += 1
        return False

    many = OpenRuns((A,), has_root, GRACE, GAP, MEMORY, HeldBytes())
    rng = random.Random(seed)
    effects = Effects()
    for number in range(5000):
        many.add_part(f"{rng.randrange(100):04x}", part(number * 10, b"%d" % number), effects)
        many.mark(active(number * 10), effects)
    assert asked == 0
    many.mark(active(50_000 + GRACE), effects)
    assert asked == 100
