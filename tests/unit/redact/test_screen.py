"""The screen: hidden text, texts of many scripts, every string of a document, speed."""

import json
import random
import time
from typing import Any

import msgspec
import pytest

from tests.support.builders import read_jsonl
from worker.redact.screen import place_of, screen_json, screen_texts

FLAG = "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("pay \u202e001$\u202c", {"bidi-override-chars", "direction-override"}),
        ("\u202dabc\u202c", {"bidi-override-chars", "direction-override"}),
        ("if admin \u2067 return", {"bidi-override-chars"}),
        ("open \u2066 here\nand \u2069 there", {"bidi-override-chars"}),
        ("a\u202c", {"bidi-override-chars"}),
        ("\u202aa\u2069", {"bidi-override-chars"}),
        ("the price is \u206612 \u20ac\u2069", set()),
        ("hello " + "".join(chr(0xE0000 + ord(letter)) for letter in "send it"), {"tag-characters"}),
        (FLAG, set()),
        (f"{FLAG[:-1]}", {"tag-characters"}),
        (FLAG[0] + "".join(chr(0xE0000 + ord(letter)) for letter in "obey") + FLAG[-1], {"tag-characters"}),
        ("x \u200b\u200c\u200d", {"zero-width-steganography"}),
        ("x \u200b\u200c y", set()),
        ("ok \U0001f44d" + "\ufe01\ufe02\ufe03" * 2, {"zero-width-steganography"}),
        ("ok \u2063\u2062\u2063\u2062\u2063\u2062", {"zero-width-steganography"}),
        ("pass\u200bword", {"invisible-in-word"}),
        ("te\u2028xt", {"invisible-in-word"}),
        ("API\u200c\u0647\u0627", set()),  # Persian: APIs
    ],
)
def test_hidden_text(text: str, rules: set[str]) -> None:
    assert set(screen_texts([text]).rules) == rules


@pytest.mark.parametrize(
    "text",
    [
        *(case["text"] for case in read_jsonl("screen_texts.jsonl")),
        # families, flags, skin tones, keycaps, and text with marks and isolates as software writes them
        "👩‍👩‍👧‍👦 👨🏽‍💻 🏳️‍🌈 🏳️‍⚧️ 👁️‍🗨️ ❤️‍🔥 1️⃣ ☎︎ 🇺🇦 🏴‍☠️",
        "🏴󠁧󠁢󠁥󠁮󠁧󠁿🏴󠁧󠁢󠁳󠁣󠁴󠁿🏴󠁧󠁢󠁷󠁬󠁳󠁿",
        "הקובץ \u2068report.txt\u2069 נשמר ב\u200f-\u200eC:\\data\u200e.",
        "العدد \u202a+49 30 123456\u202c غير صحيح",
        "葛\U000e0100城市 辻\U000e0101",
        "soft\u00adware and Auflage, 50\u202f% de réduction",
        # selectors that a writing needs
        "\u2764\ufe0f \u2600\ufe0f \U0001f3f3\ufe0f\u200d\U0001f308 " * 20,
        "1\ufe0f\u20e3 #\ufe0f\u20e3 *\ufe0f\u20e3 " * 20,
        "\u845b\U000e0100\u8fbb\U000e0101 " * 20,
        "\u182d\u180b\u182f " * 20,
        "\u2268\ufe00 \u2229\ufe00 " * 20,
        "\U0001f600\ufe0f \U0001f5a5\ufe0e " * 20,
        "pasted\u2060 text\ufe0f with\u2063 one",
    ],
)
def test_texts_of_many_scripts_emoji_and_marks_of_direction_pass(text: str) -> None:
    assert screen_texts([text]).rules == ()


def test_every_string_of_a_document_counts_and_nothing_else(seed: int) -> None:
    """Names of members, values, those of members that are there twice, at any depth, with any escapes."""
    rng = random.Random(seed)
    planted = {
        "tag-characters": "\U000e0041", "invisible-in-word": "a\u200bb", "bidi-override-chars": "x\u2066",
        "zero-width-steganography": "\u200b" * 3,
    }  # fmt: skip

    def quoted(text: str) -> str:
        return json.dumps(text, ensure_ascii=rng.random() < 0.5)

    def value(texts: list[str], depth: int) -> str:
        if len(texts) == 1 and rng.random() < 0.5:
            return quoted(texts[0])
        if not texts or depth > 6:
            harmless = ["1.5e3", "null", '""', "[]", '"\\"ign\\u00f6re"', '"\u200b"', '"\\u2066\\u2069"']
            return rng.choice(harmless) if not texts else "[" + ",".join(map(quoted, texts)) + "]"
        cut = rng.randint(0, len(texts))
        name = texts.pop() if rng.random() < 0.5 else rng.choice(["a", "a", "\u200b", "b\u200b"])
        left, right = value(texts[:cut], depth + 1), value(texts[cut:], depth + 1)
        return rng.choice([f"[{quoted(name)}, {left}, {right}]", f'{{{quoted(name)} : {left},"a":{right}, "a":0}}'])

    for _ in range(500):
        chosen = [rule for rule in planted if rng.random() < 0.4]
        raw = value([planted[rule] for rule in chosen], 0)
        assert sorted(screen_json(raw.encode()).rules) == sorted(chosen), f"seed {seed}: {raw}"


def test_what_is_spread_over_strings_is_not_hidden() -> None:
    for strings in (["a\u200b\u200c", "\u200db"], ["a\u200b", "b"], ["a", "\u200bb"]):
        assert screen_texts(strings).rules == ()


def test_the_place_is_a_member_of_the_schema() -> None:
    document: dict[str, Any] = {
        "id": "x",
        "task": {"objective": "y"},
        "steps": [{"content": "z"}, {"input": {"\u202e": 1}}],
    }
    assert place_of(document) == "steps.1.input"
    document["task"] = {"a\u200bb": 1}  # marked, but not refused
    assert place_of(document) == "steps.1.input"
    document["task"] = {"a\u200bb": "\u202e"}
    assert place_of(document) == "task"


PARTS = [
    "a", "\n", "\0", "é", "字", "🏽", "İ", "\u00ad", "\u200b", "a\u200b", "\u200b\u200ba", "\ufe0f", "\u202a", "\u2066",
    "\u202a\u202c", "\u2066\u2069", "\U000e0041", FLAG, FLAG[0], FLAG[:2], "\U0001f600\ufe0f", "\ufffa",
]  # fmt: skip
"""What is repeated to a text."""


@pytest.mark.slow
def test_time_is_linear() -> None:
    """Half a second for 1 MiB at most; quadratic time would be minutes."""
    size = 1 << 18
    for part in PARTS:
        length = len(msgspec.json.encode(part)) - 2
        documents: list[Any] = [[start + part * (size // length)] for start in ("", "output \u200b", "\u2066")]
        for document in [*documents, [part] * (size // (length + 3))]:
            raw = msgspec.json.encode(document)
            begun = time.process_time()
            screen_json(raw)
            assert time.process_time() - begun < 0.125, f"{part!a}: {str(document)[:40]!a}"


@pytest.mark.parametrize("each", range(1, 6))
@pytest.mark.parametrize("base", ["a", " ", "\u00e9", "\u0436", "\U0001f600", "."])
def test_selectors_that_carry_a_message_are_found_however_few_stand_together(base: str, each: int) -> None:
    some = "".join(chr(0xFE00 + number) for number in range(each))
    more = "".join(chr(0xE0100 + number) for number in range(each))
    for hidden in (some, more):
        assert screen_texts([(base + hidden) * 12]).rules == ("zero-width-steganography",)
        assert screen_texts([base + hidden] * 12).rules == ("zero-width-steganography",)
