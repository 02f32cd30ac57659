"""`kp-worker redact --try FILE`: what redaction would replace in a file of traces."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import click

from worker.commands.shared.console import (
    ArgumentError,
    BadLines,
    Command,
    CommandError,
    errors_for_the_user,
    open_file,
    write_line,
)
from worker.commands.shared.options import json_option, read_settings, settings_options
from worker.core.terminal import number_of

if TYPE_CHECKING:
    from worker.redact.documents import Rules

AROUND = 32
"""Characters shown before and after a marker."""


class _Example(NamedTuple):
    line: int
    path: str
    before: str
    secret: str
    after: str


@click.command(cls=Command)
@click.option("--try", "file", metavar="FILE", required=True, help="JSON Lines with traces; - is standard input.")
@click.option("--rules", type=click.Choice(["reference", "strict"]),
              help="Overrides KP_REDACT_RULES [strict, as for contribute].")  # fmt: skip
@click.option("--examples", type=click.IntRange(0), default=5, show_default=True, metavar="N",
              help="Show at most N of each type.")  # fmt: skip
@json_option
@settings_options
def redact(file: str, rules: str | None, examples: int, as_json: bool) -> None:
    """Show what redaction would replace in a JSON Lines file of traces, with the secrets masked.

    Each letter of a secret appears as a or A, each digit as 9. The level is each trace's metadata.privacy_level. To try
    your own patterns, set KP_REDACT_PATTERNS_FILE. Exit code 1: some lines are not JSON objects, or reading failed.
    """
    settings = read_settings(redact_rules=rules)
    with errors_for_the_user():
        from worker.config.redaction_rules import redaction_rules

        chosen = redaction_rules(settings, unset="strict")
    try:
        source = open_file(file, "rb")
    except OSError as error:
        raise ArgumentError("--try", f"{file}: {error.strerror}") from None
    with errors_for_the_user(), source:
        sys.exit(_show(source, file, chosen, settings.max_message_bytes, examples, as_json=as_json))


def _show(source: BinaryIO, name: str, rules: Rules, largest: int, most: int, *, as_json: bool) -> int:
    """Read the file, show what would be replaced, and return the exit code."""
    import msgspec

    from worker.commands.shared.json_lines import is_pretty_printed, pretty_printed_hint, read_lines
    from worker.core.terminal import clean
    from worker.redact.documents import level_of, redact_document

    counts: Counter[str] = Counter()
    found: dict[str, list[_Example]] = {}
    traces = touched = 0
    bad = BadLines(clean(name))
    for line in read_lines(source, largest):
        if not line.data.strip() and line.problem is None:
            continue
        if line.number == 1 and is_pretty_printed(line.data):
            raise CommandError(pretty_printed_hint(name, line.data))
        try:
            document = None if line.problem else msgspec.json.decode(line.data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            document = None
        if not isinstance(document, dict):
            bad.name(f"{line.number}: {line.problem or 'not a JSON object'}; left out")
            continue
        cleaned, set_here = redact_document(document, level_of(document), rules)
        traces, touched = traces + 1, touched + bool(set_here)
        counts.update(set_here)
        if any(len(found.get(kind, ())) < most for kind in set_here):
            for kind, example in _changes(document, cleaned, line.number):
                if len(kept := found.setdefault(kind, [])) < most:
                    kept.append(example)
    bad.say_rest("these are left out as well")
    if as_json:
        shown = {kind: {"count": count, "examples": [e._asdict() for e in found.get(kind, ())]}
                 for kind, count in counts.most_common()}  # fmt: skip
        write_line(json.dumps({"rules": rules.name, "traces": traces, "changed": touched, "types": shown}))
        return int(bad.count > 0)
    write_line(f"the {rules.name} rules would change {touched} of {number_of(traces, 'trace')}.")
    for kind, count in counts.most_common():
        write_line(f"\n{kind}: {count}")
        for example in found.get(kind, ()):
            write_line(clean(f"  {example.line}: {example.path}: {example.before}«{example.secret}»{example.after}"))
    return int(bad.count > 0)


def _changes(document: Any, cleaned: Any, line: int) -> Iterator[tuple[str, _Example]]:
    """Yield each marker of the cleaned document, with its type."""
    pending = [(document, cleaned, "")]
    while pending:
        before, after, path = pending.pop()
        if isinstance(before, dict) and isinstance(after, dict):
            for (name, value), (cleaned_name, cleaned_value) in zip(before.items(), after.items(), strict=True):
                place = f"{path}.{cleaned_name}" if path else cleaned_name
                if name != cleaned_name:
                    yield from _markers(name, cleaned_name, line, place)
                pending.append((value, cleaned_value, place))
        elif isinstance(before, list) and isinstance(after, list):
            pending += [(*pair, f"{path}[{index}]") for index, pair in enumerate(zip(before, after, strict=True))]
        elif isinstance(after, str) and before != after:
            yield from _markers(before if isinstance(before, str) else json.dumps(before), after, line, path)


def _markers(before: str, after: str, line: int, path: str) -> Iterator[tuple[str, _Example]]:
    """Yield the markers of a text. A replaced text lies between the parts around its marker, common to both texts."""
    from worker.redact.markers import MARKER

    markers = list(islice(MARKER.finditer(after), 1000))
    place = 0
    for number, marker in enumerate(markers):
        end = markers[number + 1].start() if number + 1 < len(markers) else len(after)
        start = place + marker.start() - (markers[number - 1].end() if number else 0)
        following = after[marker.end() : end]
        behind = before.find(following, start + 1) if following else len(before)
        if number + 1 == len(markers):
            behind = len(before) - len(following)
        place = behind = max(start, behind)
        if before[start:behind] == marker[0]:
            continue  # it was already there
        left, right = after[max(0, marker.start() - AROUND) : marker.start()], after[marker.end() :][:AROUND]
        kind = marker[0].removeprefix("[REDACTED:").removesuffix("]")
        yield kind, _Example(line, path, _one_line(left), _masked(before[start:behind]), _one_line(right))


def _masked(secret: str) -> str:
    """Return the shape of a secret: a for a letter, A for a capital, 9 for a digit; at most 40 characters."""
    shape = "".join(
        "9" if c.isdigit() else "A" if c.isupper() else "a" if c.isalpha() or ord(c) > 126 else c for c in secret[:40]
    )
    return _one_line(shape) + (f"... ({len(secret)} characters)" if len(secret) > 40 else "")


def _one_line(text: str) -> str:
    return " ".join(text.split("\n"))
