"""Prints each check as it is made and counts those that failed."""

from __future__ import annotations


class Checks:
    """Called with what is checked, what was found and what was expected."""

    def __init__(self) -> None:
        self.made = 0
        self.failed = 0

    def __call__(self, what: str, found: object, expected: object) -> None:
        good = found == expected
        self.made += 1
        self.failed += not good
        seen = found if isinstance(found, bool | int) or not good else _short(found)
        print(f"{'ok  ' if good else 'FAIL'}  {what}: {seen}" + ("" if good else f", expected {expected}"), flush=True)


def _short(found: object) -> str:
    text = str(found) or "nothing"
    return text if len(text) <= 160 else f"{text[:157]}..."
