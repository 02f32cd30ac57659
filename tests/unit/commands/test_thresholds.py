"""The threshold for a share of scores, its interval, and settings as a config file, against brute force."""

import math
import random
import tomllib
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.support.reports import random_profiles, random_share, run
from worker.commands.shared.thresholds import config_to_paste, share_interval, share_threshold
from worker.config import load
from worker.core.scoring import PROFILES, Profile, Weights


def decimals(number: float) -> int:
    return len(np.format_float_positional(number, trim="-").partition(".")[2])


def test_a_threshold_accepts_what_the_order_statistic_accepts(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        kinds = [rng.random() * rng.choice([1, 1e-3, 1e-20]) for _ in range(rng.randint(1, 30))]
        scores = [rng.choice([*kinds, 0.0, 1.0, math.nextafter(kinds[0], 1)]) for _ in range(rng.randint(1, 60))]
        share = random_share(rng)
        # Brute force: of all scores, the greatest that accepts at least the share.
        enough = [cut for cut in scores if Fraction(sum(s >= cut for s in scores), len(scores)) >= share]
        cutoff = max(enough)
        chosen = share_threshold(np.array(scores), share)
        assert [s >= chosen.threshold for s in scores] == [s >= cutoff for s in scores]
        assert 0 <= chosen.threshold <= cutoff
        assert chosen.accepted == sum(s >= cutoff for s in scores) >= chosen.wanted
        assert chosen.above == sum(s > cutoff for s in scores) < chosen.wanted
        assert chosen.wanted - 1 < share * len(scores) <= chosen.wanted


def test_a_threshold_is_a_short_decimal(seed: int) -> None:
    """No decimal with fewer digits, from two on, lies between the last accepted score and the one below."""
    rng = random.Random(seed)
    for _ in range(100):
        scores = [rng.random() for _ in range(rng.randint(2, 200))]
        share = random_share(rng)
        chosen = share_threshold(np.array(scores), share)
        below = max((s for s in scores if s < chosen.threshold), default=-1.0)
        cutoff = min(s for s in scores if s >= chosen.threshold)
        digits = decimals(chosen.threshold)
        assert digits <= 17
        for fewer in range(2, digits):
            floor = Fraction(math.floor(Fraction(repr(cutoff)) * 10**fewer), 10**fewer)
            assert float(floor) <= below


@pytest.mark.parametrize(
    ("scores", "share", "expected"),
    [
        ([0.3, 0.4567, 0.8], Fraction(34, 100), (0.45, 2, 2, 1)),
        ([0.3, 0.456, 0.457, 0.8], Fraction(1, 2), (0.457, 2, 2, 1)),
        ([0.4567] * 7, Fraction(1, 10), (0.45, 1, 7, 0)),
        ([0.2, 0.6, 0.6, 0.6, 0.9], Fraction(4, 10), (0.6, 2, 4, 1)),
        ([0.0, 0.0], Fraction(1), (0.0, 2, 2, 0)),
        ([i / 1000 for i in range(100)], Fraction(7, 100), (0.093, 7, 7, 6)),  # 0.07 * 100 > 7 in floats
    ],
)
def test_thresholds_by_hand(scores: list[float], share: Fraction, expected: tuple[float, int, int, int]) -> None:
    assert share_threshold(np.array(scores), share) == expected


def test_the_interval_is_that_of_resampled_scores(seed: int) -> None:
    """Against resampling as such: the share of resamples whose threshold lies below an end is what it should be."""
    rng = np.random.default_rng(seed)
    for count, share in ((40, Fraction(1, 10)), (200, Fraction(1, 2)), (300, Fraction(1, 50)), (30, Fraction(1))):
        scores = rng.random(count)
        low, high = share_interval(scores, share, seed)
        resamples = np.sort(rng.choice(scores, (4000, count)), axis=1)
        cutoffs = resamples[:, count - math.ceil(share * count)]
        # Two samples of 4000 and 2000 and the steps between scores: 5 standard deviations are .02.
        assert (cutoffs < low).mean() < 0.025 + 0.02
        assert (cutoffs <= low).mean() > 0.025 - 0.02
        assert (cutoffs > high).mean() < 0.025 + 0.02
        assert (cutoffs >= high).mean() > 0.025 - 0.02
        assert low <= share_threshold(scores, share).threshold + 0.01 <= high + 0.01
        assert share_interval(scores, share, seed) == (low, high)


@pytest.mark.parametrize("text", ["0", "0%", "1.5", "101%", "-0.1", "nan", "1/3", "1e-9", "", "%", "ten"])
def test_a_wrong_share_is_refused(text: str) -> None:
    result = run("-", "--share", text, data=b"")
    assert (result.exit_code, "give a share above 0 and up to 1, such as 0.1 or 10%" in result.stderr) == (2, True)


def test_the_config_to_paste_gives_the_same_settings(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    threshold = rng.choice([0.75, rng.random()])
    hostile = '"]\nx = 1 #\\ \u202e\x7f家\U000e0041'
    profiles = {
        (hostile if name == "legal" else name): profile for name, profile in random_profiles(rng).items()
    }  # fmt: skip
    text = config_to_paste(profiles, threshold)
    assert text.isprintable() or set(text) - {"\n"} == {c for c in text if c.isprintable()}
    path = tmp_path / "candidate.toml"
    path.write_text(text, "utf-8")
    settings = load(path)
    assert (settings.threshold, settings.scoring_profiles()) == (threshold, profiles)


def test_the_config_to_paste_holds_only_what_differs() -> None:
    assert config_to_paste(PROFILES, 0.75) == ""
    assert config_to_paste({**PROFILES, "code": Profile(PROFILES["code"].weights, 0.6)}, 0.75) == (
        "[profiles.code]\nthreshold = 0.6"
    )
    inherited, other = Profile(PROFILES["default"].weights), Profile(PROFILES["code"].weights)
    assert config_to_paste({**PROFILES, "legal": inherited}, 0.75) == "[profiles.legal]"
    for legal in (inherited, other):  # the file changes what a profile without weights takes
        text = config_to_paste({**PROFILES, "default": other, "legal": legal}, 0.75)
        assert tomllib.loads(text)["profiles"]["legal"]["weights"] == asdict(legal.weights)
    only_complexity = Weights(1, 0, 0, 0)
    text = config_to_paste({**PROFILES, "a b": Profile(only_complexity)}, 0.75)
    assert tomllib.loads(text) == {"profiles": {"a b": {"weights": asdict(only_complexity)}}}
