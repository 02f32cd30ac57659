"""How long a text is expected to take, by what those before it took."""

import math
import random

from worker.embed.pool import Pace


def test_nothing_is_expected_before_anything_was_seen() -> None:
    assert Pace().expect(1000) == 0.0


def test_time_is_in_proportion_to_length() -> None:
    pace = Pace()
    pace.learn(100, False, 0.01)
    assert pace.expect(100) == 0.01
    assert math.isclose(pace.expect(700), 0.07)


def test_a_text_that_is_cut_takes_as_long_as_the_last_ones_that_were() -> None:
    pace = Pace()
    pace.learn(50_000, True, 0.04)
    assert pace.expect(3) == 0.04  # all that is known yet
    pace.learn(100, False, 0.004)
    assert math.isclose(pace.expect(500), 0.02)
    assert pace.expect(2_000) == 0.04
    assert pace.expect(1_000_000) == 0.04


def test_an_empty_text_is_learnt_too() -> None:
    pace = Pace()
    pace.learn(0, False, 0.002)
    assert pace.expect(0) == 0.0
    assert pace.expect(1) == 0.002


def test_it_follows_a_machine_that_gets_slower_and_forgets_an_outlier(seed: int) -> None:
    rng = random.Random(seed)
    pace = Pace()

    def expected_after(texts: int, seconds_a_character: float) -> float:
        for _ in range(texts):
            length = rng.randrange(50, 800)
            pace.learn(length, False, length * seconds_a_character * rng.uniform(0.9, 1.1))
        return pace.expect(400)

    assert abs(expected_after(50, 5e-5) / 0.02 - 1) < 0.1
    assert abs(expected_after(50, 1e-4) / 0.04 - 1) < 0.1
    pace.learn(400, False, 60.0)  # the process was stopped
    assert abs(expected_after(100, 1e-4) / 0.04 - 1) < 0.15
