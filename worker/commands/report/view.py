"""A report for people: a short text for a terminal of 80 columns, and one HTML page with plots.

The page is a single file that loads nothing, and depends only on the numbers. It needs the extra `report`, whose
libraries are imported only for a page. Colours are names of CSS variables, with values for light, dark and print.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import files
from types import SimpleNamespace
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.text import Text

from worker.commands.report.numbers import NEAR, THRESHOLDS, LeftOut, Trace
from worker.commands.report.outcomes import CHANCE, Interval
from worker.commands.shared.console import text_console
from worker.commands.shared.shown import (
    columns,
    cut_text,
    fixed,
    percent,
    shown_name,
    shown_score,
    shown_text,
    shown_threshold,
)
from worker.commands.shared.thresholds import FEW_TRACES, LEAST_TRACES, interval_text, too_few
from worker.core.records import ACCEPTED, REJECTED
from worker.core.scoring import DEFAULT_PROFILE
from worker.core.terminal import clean, number_of
from worker.version import __version__

SHOWN = 20
"""Domains without a profile, and a page's files and domains with recorded outcomes, that are listed; the others are
counted: an agent may name as many domains as it has traces."""

DECISIONS = 10
"""Changed decisions that are listed."""

TABLE = range(20, 36, 2)
"""The places of the thresholds in the table: 0.5 to 0.85 in steps of 0.05."""


class Table(NamedTuple):
    """A table in a terminal and on the page; a column of figures stands to the right."""

    heads: Sequence[str]
    rows: list[list[str]]

    @property
    def left(self) -> set[str]:
        """The columns of text."""
        return {"", "domain", "trace", "decision", "file", "confidence", "scores, 0 to 1"} & {*self.heads}

    def __rich__(self) -> RenderableType:
        """Return the table for a terminal."""
        shown = columns(*self.heads, right={*self.heads} - self.left)
        for row in self.rows:
            shown.add_row(*(Text(clean(cell), {ACCEPTED: "green", REJECTED: "red"}.get(cell, "")) for cell in row))
        return shown


def left_out(report: SimpleNamespace) -> Iterator[str]:
    """Yield lines about the skipped documents."""
    if report.repeated:
        yield f"repeated documents (identical bytes), counted once: {report.repeated:,}"
    for what, documents in _left_out(report):
        yield f"skipped, since {what}: {documents.count:,}"
        yield from (f"  {where}: {reason}" for where, reason in documents.first)
        if documents.count > len(documents.first):
            yield f"  and {documents.count - len(documents.first):,} more"


def _left_out(report: SimpleNamespace) -> list[tuple[str, LeftOut]]:
    """Return why documents were skipped, for each reason that there is."""
    unread, wrong = "they cannot be read", "their score does not follow from their own figures"
    return [(why, these) for why, these in ((unread, report.unreadable), (wrong, report.inconsistent)) if these.count]


# -- in a terminal


def print_report(report: SimpleNamespace) -> None:
    """Print the report; the lines of the config file are not wrapped, so that they can be pasted."""
    console, changed = text_console(), changes(report)
    console.print(Text(headline(report), "bold"), *(Text(f"{note}.", "yellow") for note in warnings(report)), sep="\n")
    plain = not changed and report.share is None and report.outcome is None
    if changed:
        _print_changes(console, report, changed)
    elif plain:
        _print_scores(console, [report.total, *report.domains])
    if report.other_domains and (changed or plain):
        smaller = number_of(report.other_domains, "smaller domain is", "smaller domains are")
        console.print(Text(f"{smaller} in one row.", "dim"))
    if report.share is not None:
        console.print(
            Text(f"\n{share_headline(report.share, report.total)}", "bold"),
            share_table(report.share, _domain),
            sep="\n",
        )
        for note in share_notes(report.share):
            console.print(Text(f"  {note}."))
    if report.outcome is not None:
        console.print(Text(f"\n{outcome_headline(report.outcome)}", "bold"))
        of_files = [parts_table("file", report.outcome.files)] if len(report.outcome.files) > 1 else []
        for table in (*of_files, *outcome_tables(report.outcome)):
            console.print("", table, sep="\n")
        console.print("", *(Text(clean(sentence)) for sentence in sentences(report.outcome)), sep="\n")
    else:
        for title, lines in name_lists(report):
            console.print(Text(f"\n{title}", "bold"), *(Text(f"  {line}") for line in lines), sep="\n")
    if report.config:
        console.print("\nTo use it, paste this into the config file (--config FILE, KP_CONFIG):", style="bold")
        console.print(Text(report.config), soft_wrap=True)
    elif report.config is not None:
        console.print("\nThese are the built-in threshold and profiles: there is nothing to set.", style="bold")


def _print_scores(console: Console, rows: Sequence[SimpleNamespace]) -> None:
    bars = not console.options.ascii_only
    heads = ["domain", "traces", "threshold", "accepted", "median", *(["scores, 0 to 1"] if bars else [])]
    console.print("", Table(heads, [
        [_domain(row.domain), f"{row.traces:,}", _threshold(row.before), percent(row.before.accepted / row.traces),
         shown_score(row.before.quantiles[2], row.before.threshold), *([_bars(row.before.histogram)] if bars else [])]
        for row in rows
    ]), sep="\n")  # fmt: skip
    console.print(Text("\nShare that reaches a threshold", "bold"), reaching_table(rows, _domain), sep="\n")


def name_lists(report: SimpleNamespace) -> Iterator[tuple[str, list[str]]]:
    """Yield domains and profiles that do not meet, as lines below a title."""
    without = [(f"{shown_name(of.name)}: {number_of(of.traces, 'trace')}", of.near) for of in report.without_profile]
    unused = [(shown_name(of.name), of.near) for of in report.unused_profiles]
    for title, names in (
        ("Domains without a profile (they take default)", without),
        ("Profiles that no trace takes", unused),
    ):
        if names:
            lines = [line if near is None else f"{line}; did you mean {shown_name(near)}?" for line, near in names]
            yield title, lines[:SHOWN] + ([f"and {len(lines) - SHOWN:,} more"] if len(lines) > SHOWN else [])


def headline(report: SimpleNamespace) -> str:
    """Return what there is, in two lines."""
    near, total = report.near_duplicates, report.total
    return (
        f"{number_of(total.traces, 'trace')} of {shown_text(report.source)}, {period(report)}\n"
        f"accepted: {total.before.accepted:,} ({percent(total.before.accepted / total.traces)}); near-duplicates "
        f"(similarity {NEAR} or more): {near.traces:,}, {near.accepted:,} of them accepted"
    )


def period(report: SimpleNamespace) -> str:
    """Return the stream times of the first and last trace."""
    first, last = (time[:16].replace("T", " ") for time in (report.first, report.last))
    return f"{first} UTC" if first == last else f"{first} to {last.removeprefix(first[:11])} UTC"


def warnings(report: SimpleNamespace) -> Iterator[str]:
    """Yield what a reader of the figures must know."""
    if len(report.embedders) > 1:
        made = "; ".join(f"{maker}: {count:,}" for maker, count in report.embedders)
        yield f"scored in {len(report.embedders)} ways: {made}. Scores of different models are not comparable"
    if report.changed_within:
        names = ", ".join(map(shown_name, report.changed_within))
        yield f"threshold or weights changed within: {names}. The threshold shown is the last one"
    if report.hidden_text:
        marks = ", ".join(f"{rule} {count:,}" for rule, count in report.hidden_text.items())
        yield f"traces with hidden text, by the screen's rule: {marks}"


def reaching_table(rows: Iterable[SimpleNamespace], name: Callable[[str], str] = shown_name) -> Table:
    """Return the share of each domain that reaches a threshold."""
    return Table(["domain", *(f"{THRESHOLDS[place]:.2f}" for place in TABLE)], [
        [name(row.domain), *(percent(row.before.reaching[place]) for place in TABLE)] for row in rows
    ])  # fmt: skip


# -- what other settings change


def changes(report: SimpleNamespace) -> str:
    """Return what the settings change, in a sentence; "" if nothing was tried, or a share alone changes nothing."""
    total = report.total
    if report.changes is None or (report.share is not None and not total.to_accepted + total.to_rejected):
        return ""
    before, after = (
        f"{side.accepted:,} ({percent(side.accepted / total.traces)})" for side in (total.before, total.after)
    )
    return f"Accepted with these settings: {before} -> {after}"


def _print_changes(console: Console, report: SimpleNamespace, title: str) -> None:
    total, changed = report.total, report.total.to_accepted + report.total.to_rejected
    console.print(Text(f"\n{title}" if changed else "\nWith these settings no decision changes.", "bold"))
    if not changed:
        return
    if report.changes.same_share is not None and total.before.accepted != total.after.accepted:
        console.print(Text(f"one threshold for all, {report.changes.same_share!r}, would accept as many as now"))
    console.print("", Table(("domain", "traces", "threshold", "accepted", "become\naccepted", "become\nrejected"), [
        [_domain(row.domain), f"{row.traces:,}", _arrow(_threshold(row.before), _threshold(row.after)),
         _arrow(*(percent(side.accepted / row.traces) for side in (row.before, row.after))), f"{row.to_accepted:,}",
         f"{row.to_rejected:,}"]
        for row in (total, *report.domains)
    ]), sep="\n")  # fmt: skip
    more = f", the first {DECISIONS} (--json has more)" if changed > DECISIONS else ""
    console.print(Text(f"\nDecisions that change: {changed:,}{more}", "bold"))
    console.print(Table(("trace", "domain", "score", "decision"), [
        [cut_text(shown_text(trace.id.removeprefix("kp:trace:")), 36), cut_text(shown_name(trace.domain), 12),
         score_change(trace), trace.after.decision]
        for trace in report.changes.decisions[:DECISIONS]
    ]))  # fmt: skip


def score_change(trace: Trace) -> str:
    """Return a trace's score before and after; an unchanged one with the digits that both thresholds need."""
    before, after = (shown_score(side.score, side.threshold) for side in (trace.before, trace.after))
    return max(before, after, key=len) if trace.before.score == trace.after.score else _arrow(before, after)


# -- thresholds for a share


def share_headline(proposal: SimpleNamespace, total: SimpleNamespace) -> str:
    """Return what is proposed."""
    before, after = (percent(count / total.traces) for count in (proposal.accepted_before, proposal.accepted))
    return f"Thresholds for the best {proposal.share * 100:g}% of each domain; accepted of all: {before} -> {after}"


def share_table(proposal: SimpleNamespace, name: Callable[[str], str] = shown_name) -> Table:
    """Return the proposed thresholds."""
    return Table(("domain", "traces", "threshold", "95% interval", "accepted"), [
        [name(row.domain), f"{row.traces:,}", _arrow(f"{row.threshold_before!r}", f"{row.threshold!r}"),
         "" if row.interval is None else interval_text(row.interval),
         _arrow(*(percent(count / row.traces) for count in (row.accepted_before, row.accepted)))]
        for row in proposal.domains
    ])  # fmt: skip


def share_notes(proposal: SimpleNamespace) -> Iterator[str]:
    """Yield notes on the proposed thresholds."""
    named = []
    for row in proposal.domains:
        name = shown_name(row.domain)
        if row.traces < LEAST_TRACES:
            yield f"{name}: {too_few(row.traces)}; it keeps its threshold"
        elif row.traces < FEW_TRACES:
            yield f"{name}: {row.traces} traces are few; the threshold may accept another share of the next ones"
        if row.wanted is not None and row.above is not None and row.accepted > row.wanted:
            yield (
                f"{name}: {row.accepted - row.above:,} traces tie, so {row.accepted:,} are accepted, not "
                f"{row.wanted:,}; a threshold above the tie accepts {row.above:,}"
            )
        if row.interval is not None and row.profile == DEFAULT_PROFILE != row.domain:
            named.append(name)
    if named:
        more = f" and {len(named) - SHOWN:,} more" if len(named) > SHOWN else ""
        yield (
            f"without a profile: {', '.join(named[:SHOWN])}{more}. Such domains share the threshold of default; the "
            "config gives each its own profile, with the weights of default"
        )
    if any(row.domain == DEFAULT_PROFILE for row in proposal.domains):
        yield "default: its threshold also applies to every domain without a profile"
    if proposal.other_domains:
        smaller = number_of(proposal.other_domains, "smaller domain keeps its", "smaller domains keep their")
        yield f"{smaller} threshold: fewer than {FEW_TRACES} traces"


# -- recorded outcomes


def outcome_headline(outcomes: SimpleNamespace) -> str:
    """Return what was recorded."""
    tasks = f"{outcomes.tasks:,} tasks ({shown_text(outcomes.task)})" if outcomes.task else "each run a task"
    return f"{outcomes.runs:,} runs, {percent(outcomes.succeeded)} succeeded by {shown_text(outcomes.outcome)}; {tasks}"


def parts_table(kind: str, parts: Iterable[SimpleNamespace]) -> Table:
    """Return the runs of each file or domain."""
    return Table((kind, "runs", "succeeded", "claims", "of them true"), [
        [cut_text(shown_name(part.name), 32), f"{part.runs:,}", percent(part.succeeded), f"{part.claims:,}",
         "-" if part.true is None else percent(part.true)]
        for part in parts
    ])  # fmt: skip


def outcome_tables(outcomes: SimpleNamespace) -> list[Table]:
    """Return the figures by kind of confidence."""
    bases = [basis for basis in (outcomes.stated, outcomes.record) if basis]
    return [
        Table(("confidence", "AUC of the score", "of the confidence", "best fifth", "novelty"), [
            [f"{basis.name}, {scope.name}", _cell(scope.auc_score), _cell(scope.auc_confidence),
             _cell(scope.best_fifth), "" if place else f"{basis.best_novelty:.2f}"]
            for basis in (*bases, outcomes.weighted) if basis for place, scope in enumerate(basis.scopes)
        ]),
        Table(("", "accepted", "of them succeeded", "Brier", "constant", "ECE"), [
            [basis.name, _cell(basis.accepted), _cell(basis.succeeded), _cell(basis.brier), f"{basis.constant:.3f}",
             f"{basis.ece:.3f}"]
            for basis in bases
        ]),
    ]  # fmt: skip


def sentences(outcomes: SimpleNamespace) -> Iterator[str]:
    """Yield sentences on what the figures show, and what they do not."""
    if outcomes.judging is not None:
        yield (
            f"record: verdicts on {outcomes.judging.share * 100:g}% of the runs, drawn at random, "
            f"{outcomes.judging.late} runs late. All files are mixed; means over {outcomes.orders} random orders, of "
            f"each the last {outcomes.measured:,} runs."
        )
    elif outcomes.record is not None:
        yield "record: the verdicts on KP_JUDGED_TOPIC that stand before each run."
    yield _about_score(outcomes.stated, "With the stated confidence")
    if outcomes.record is not None:
        yield _about_score(outcomes.record, "By the record")
        if outcomes.gain is not None:
            shown = (
                "no difference is shown" if outcomes.gain.low <= 0 <= outcomes.gain.high else "a difference is shown"
            )
            yield f"The record changes the AUC of the score by {_signed(outcomes.gain)}; {shown}."
        for scope in outcomes.record.scopes[1:]:
            if scope.auc_confidence is not None and scope.auc_confidence.low <= CHANCE:
                yield (
                    f"{scope.name.capitalize()}, the record's AUC is {scope.auc_confidence}: it tells agents and "
                    "fleets apart rather than runs."
                )
        if outcomes.weighted is not None and outcomes.weighted_gain is not None:
            pays = (
                "; docs/verdicts.md has such weights" if outcomes.weighted_gain.low > 0 else "; no difference is shown"
            )
            yield (
                f"Weights where the outcome has 0.6 change the successes in the best fifth by "
                f"{_signed(outcomes.weighted_gain)}, and its novelty from {outcomes.record.best_novelty:.2f} to "
                f"{outcomes.weighted.best_novelty:.2f}{pays}."
            )
    yield from (_about_threshold(basis) for basis in (outcomes.stated, outcomes.record) if basis is not None)
    yield "Intervals are 95 %, over tasks: other agents may differ by more. ECE has none, since resampling raises it."
    if outcomes.runs < 50:  # with fewer runs, an AUC's interval is wider than .3: it shows nothing
        yield f"{outcomes.runs} runs are few, so the intervals themselves are rough."


def _about_score(basis: SimpleNamespace, how: str) -> str:
    auc = basis.scopes[0].auc_score
    if auc is None:
        return f"{how}, there is nothing to compare."
    start = f"{how}, the score's AUC is {auc}: "
    if auc.low > CHANCE:
        return start + f"better than chance ({CHANCE})."
    if auc.high < CHANCE:
        return start + f"worse than chance ({CHANCE}): runs that failed score higher."
    return start + f"the interval holds {CHANCE}, so it is not shown to tell success from failure."


def _about_threshold(basis: SimpleNamespace) -> str:
    now = "" if basis.succeeded is None else f" ({percent(basis.succeeded.value)} of them succeeded)"
    start, better = f"{basis.name}: {percent(basis.accepted.value)} are accepted{now}. ", basis.better
    if better is None or better.gain.low <= 0:
        why = "" if better is None else f" (on other tasks, {_signed(better.gain)})"
        return start + f"No threshold reliably separates successes from failures{why}."
    return (
        start + f"{better.threshold:.3f} would have been better: chosen on other tasks, such a threshold accepts "
        f"{percent(better.accepted.value)}, of which {better.succeeded or '-'} succeeded."
    )


# -- cells


def _signed(interval: Interval) -> str:
    value, low, high = (round(number, 3) + 0.0 for number in (interval.value, interval.low, interval.high))  # no -0.000
    return f"{value:+.3f} ({low:+.3f} to {high:+.3f})"


def _cell(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.value:.3f} {interval.low:.3f}-{interval.high:.3f}"


def _domain(name: str) -> str:
    return cut_text(shown_name(name), 16)


def _threshold(scores: SimpleNamespace) -> str:
    return "" if scores.threshold is None else shown_threshold(scores.threshold)


def _arrow(before: str, after: str) -> str:
    """Return `before -> after`, or just `before` if they are equal or one of them is missing."""
    return before if before == after or not (before and after) else f"{before} -> {after}"


def _bars(counts: Sequence[int]) -> str:
    """Draw a histogram in half as many characters."""
    pairs = [one + other for one, other in zip(counts[::2], counts[1::2], strict=True)]
    most = max(pairs) or 1
    return "".join(" ▁▂▃▄▅▆▇█"[-(-count * 8 // most)] for count in pairs)


# -- the page

SERIES = 8
"""Number of colours for curves; a ninth would be hard to distinguish."""


def render(report: SimpleNamespace) -> str:
    """Return the page; it depends only on the numbers."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        finalize=lambda value: clean(value, "\n") if type(value) is str else value,
    )  # fmt: skip
    environment.filters |= {
        "n": lambda value: f"{value:,}", "pct": percent, "f2": lambda value: fixed(value, 2),
        "text": shown_text, "name": shown_name, "score": shown_score, "threshold": shown_threshold,
        "score_change": score_change, "ticks": _ticks, "cut": _cut,
    }  # fmt: skip
    for function in (period, warnings, changes, name_lists, reaching_table, share_headline, share_table, share_notes,
                     outcome_headline, sentences, outcome_tables, parts_table):  # fmt: skip
        environment.globals[function.__name__] = function
    template = environment.from_string(files("worker").joinpath("data/report.html.j2").read_text("utf-8"))
    named = report.domains[:-1] if report.other_domains else report.domains
    curves = named[:SERIES] if len(named) > 1 else [report.total]
    return template.render(
        r=report, version=__version__, decisions=DECISIONS, near=NEAR, curves=curves, left_out=_left_out(report)
    )


def _cut(table: Table) -> Table:
    """Return the first SHOWN rows of a table, and in one more how many others there are."""
    more = [f"and {len(table.rows) - SHOWN:,} more"] + [""] * (len(table.heads) - 1)
    return table if len(table.rows) <= SHOWN else Table(table.heads, [*table.rows[:SHOWN], more])


def _ticks(most: int) -> range:
    """Return about four round numbers from 0 up to `most`, for an axis."""
    steps = (digit * 10**power for power in range(12) for digit in (1, 2, 5))
    return range(0, most + 1, next(step for step in steps if step * 4.5 >= most))
