"""Which epoch goes on, which begins, and what it inherits; the bytes of metadata and marker."""

import pytest

from worker.core.changelog import (
    MARKER_VERSION,
    MAX_SEGMENTS,
    UNREADABLE,
    Chain,
    Committed,
    Housekeeping,
    Marker,
    Row,
    Segment,
    SourceEpoch,
    committed_from,
    decode_marker,
    encode_marker,
)
from worker.core.restore import SourcePosition, at_offset, cut, resolve, without_embedder

OURS = "topic-id-of-22-letters"
OTHER = "another-topic-s-id-22-"
END = 900
FIRST = (Segment(1, 0, 0),)
TWO = (Segment(1, 0, 0), Segment(4, 50, 700))
MOVED, NONE = "the committed offset was moved", "no offset is committed"
RECREATED, AWAY = "the source topic was recreated", "an embedder is configured again"


def marker(chain: Chain, topic_id: str = OURS) -> Marker:
    return Marker(MARKER_VERSION, topic_id, chain)


def kp2(number: int | None, start: int, topic_id: str | None = OURS) -> Committed:
    return Committed(topic_id, number, start, 7)


@pytest.mark.parametrize("time", [None, 0, -5, 1_776_153_603_589, -62_135_596_800_000, 253_402_300_799_999])
@pytest.mark.parametrize("topic_id", [None, OURS])
@pytest.mark.parametrize("number", [None, 0, 17])
def test_metadata_comes_back_as_it_went(time: int | None, topic_id: str | None, number: int | None) -> None:
    metadata = SourceEpoch(topic_id, number, 10**15).metadata(time)
    assert committed_from(metadata) == Committed(topic_id, number, 10**15, time)
    assert len(metadata) < 100


@pytest.mark.parametrize(
    "metadata",
    ["", "kp1", "kp1:x", "kp1:5", "kp1:5:6", "5", "kp2:5", "kp2:::", "kp2::::", "kp2::::-1",
     "kp2:::x:1", "kp2::short:1:1", "kp3:5::1:0", " kp2::::0",
     "kp2::::0\n", "kp2::::²", "kp2:::1:" + "9" * 30, "kp2:253402300800000::1:0", "kp1:999999999999999999",
     "kp2:-62135596800001::1:0"],
)  # fmt: skip
def test_metadata_that_is_not_ours(metadata: str) -> None:
    assert committed_from(metadata) is None


def test_a_marker_comes_back_as_it_went() -> None:
    for chain in ((), FIRST, TWO):
        assert decode_marker(encode_marker(marker(chain))) == marker(chain)
    longest = tuple(Segment(2**31 + i, 2**40 + i, 2**40 + i) for i in range(MAX_SEGMENTS))
    assert len(encode_marker(marker(longest))) < 4096


def test_which_epoch_counts_for_an_offset() -> None:
    assert [getattr(at_offset(TWO, offset), "number", None) for offset in (0, 49, 50, 1000)] == [1, 1, 4, 4]
    assert at_offset(TWO[1:], 49) is None
    assert cut(TWO, 50) == FIRST
    assert cut(TWO, 51) == TWO


@pytest.mark.parametrize(
    ("position", "before", "chain", "begins"),
    [
        # a committed epoch goes on
        (SourcePosition(60, True, kp2(1, 0), OURS), marker(FIRST), FIRST, None),
        (SourcePosition(60, True, kp2(4, 50), OURS), marker(TWO), TWO, None),
        (SourcePosition(60, True, kp2(4, 50, None), OURS), marker(TWO), TWO, None),
        (SourcePosition(60, True, kp2(4, 50), None), marker(TWO), TWO, None),
        # ... where a frozen worker wrote its marker late, or the marker was deleted: the metadata tells
        (SourcePosition(60, True, kp2(4, 50), OURS), marker(FIRST), (*FIRST, Segment(4, 50, END)), None),
        (SourcePosition(60, True, kp2(4, 50), OURS), marker(TWO, OTHER), (Segment(4, 50, END),), None),
        # the offset was moved: below it everything counts as before
        (SourcePosition(60, True, None, OURS), marker(TWO), (*TWO, Segment(6, 60, END)), MOVED),
        (SourcePosition(50, True, None, OURS), marker(TWO), (*FIRST, Segment(6, 50, END)), MOVED),
        (SourcePosition(0, True, None, OURS), marker(TWO), (Segment(6, 0, END),), MOVED),
        (SourcePosition(60, True, None, None), marker(TWO, ""), (*TWO, Segment(6, 60, END)), MOVED),
        (SourcePosition(60, True, None, OURS), None, (Segment(6, 60, END),), MOVED),
        (SourcePosition(60, True, None, OURS), UNREADABLE, (Segment(6, 60, END),), MOVED),
        (SourcePosition(60, True, kp2(4, 61), OURS), marker(TWO), (*TWO, Segment(6, 60, END)), MOVED),
        (SourcePosition(60, True, kp2(4, 50), OURS), None, (Segment(4, 50, END),), None),
        # no offset is committed: the same topic can be told by its id alone
        (SourcePosition(60, False, None, OURS), marker(TWO), (*TWO, Segment(6, 60, END)), NONE),
        (SourcePosition(60, False, None, OURS), marker(TWO, ""), (Segment(6, 60, END),), NONE),
        (SourcePosition(60, False, None, None), marker(TWO), (Segment(6, 60, END),), NONE),
        (SourcePosition(60, False, None, OURS), None, (Segment(6, 60, END),), NONE),
        # the source was recreated
        (SourcePosition(60, True, None, OURS), marker(TWO, OTHER), (Segment(6, 60, END),), RECREATED),
        (SourcePosition(60, False, None, OURS), marker(TWO, OTHER), (Segment(6, 60, END),), RECREATED),
        (SourcePosition(0, True, kp2(4, 50, OTHER), OURS, True), marker(TWO, OTHER), (Segment(6, 0, END),), RECREATED),
        # the embedder was away since offset 55
        (SourcePosition(60, True, kp2(None, 55), OURS), marker(TWO), (*TWO, Segment(6, 55, END)), AWAY),
        (SourcePosition(60, True, kp2(None, 20), OURS), marker(TWO), (*FIRST, Segment(6, 20, END)), AWAY),
        (SourcePosition(60, True, kp2(None, 55), OURS), None, (Segment(6, 55, END),), AWAY),
    ],
)  # fmt: skip
def test_which_epoch_goes_on_or_begins(
    position: SourcePosition, before: Marker | None, chain: Chain, begins: str | None
) -> None:
    resolved = resolve(position, before, 5, END)
    assert resolved.chain == chain
    last = chain[-1]
    assert resolved.current == SourceEpoch(position.topic_id, last.number, last.start)
    assert resolved.begins == begins
    assert resolved.marker() == Marker(MARKER_VERSION, position.topic_id or "", chain)


def test_the_first_epoch_of_a_group_has_number_1() -> None:
    assert resolve(SourcePosition(3, False, None, OURS), None, 0, 0).chain == (Segment(1, 3, 0),)


def test_a_new_changelog_begins_an_epoch_as_nothing_before_is_on_it() -> None:
    resolved = resolve(SourcePosition(60, True, kp2(4, 50), OURS), None, 0, 0)
    assert (resolved.chain, resolved.begins) == ((Segment(5, 60, 0),), "the changelog is new")
    assert resolve(SourcePosition(70, True, kp2(5, 60), OURS), resolved.marker(), 5, END).chain == resolved.chain


def test_a_chain_does_not_grow_without_end() -> None:
    before: Marker | None = None
    for offset in range(1, 300):
        before = resolve(SourcePosition(offset, True, None, OURS), before, 0, END).marker()
    assert len(before.chain) == MAX_SEGMENTS
    assert before.chain[-1].start == 299


@pytest.mark.parametrize(
    ("position", "start"),
    [
        (SourcePosition(60, True, kp2(4, 50), OURS), 60),
        (SourcePosition(60, True, None, OURS), 60),
        (SourcePosition(60, False, None, OURS), 60),
        (SourcePosition(60, True, kp2(None, 20), OURS), 20),
        (SourcePosition(0, True, kp2(None, 20, OTHER), OURS, True), 0),
    ],
)
def test_a_worker_without_an_embedder_names_where_it_began(position: SourcePosition, start: int) -> None:
    assert without_embedder(position) == SourceEpoch(OURS, None, start)


# -- what goes around the entries


def test_what_leaves_goes_just_before_the_entry_that_it_leaves_for() -> None:
    keeping = Housekeeping([(b"dead", None), (b"passes", b"m")], [(7, b"c"), (5, b"a"), (6, b"b"), (9, b"d")])
    entries: list[Row] = [(b"x", b"5"), (b"y", b"6")]
    rows = keeping.rows(entries, 6, 100)
    assert [key for key, _ in rows] == [b"dead", b"passes", b"a", b"x", b"b", b"y"]
    assert keeping.rows([], None, 101) == []
    assert [key for key, _ in keeping.rows([(b"z", b"9")], 9, 102)] == [b"c", b"d", b"z"]
    assert keeping.rows(entries, 11, 103) is entries


def test_what_was_ahead_goes_when_its_record_is_a_dead_letter_this_time() -> None:
    keeping = Housekeeping(ahead=[(10, b"a"), (11, b"b"), (12, b"c"), (12, b"old capacity")])
    assert keeping.rows([(b"a", b"1")], 0, 11) == [(b"a", b"1")]
    assert keeping.rows([], None, 12) == [(b"b", None)]
    assert keeping.rows([(b"c", b"1")], 1, 20) == [(b"c", b"1"), (b"old capacity", None)]
