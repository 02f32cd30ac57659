"""Records as read and as published: their sizes, and the names of what is found in them; an embedder's identity."""

from collections.abc import Callable, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from worker.core.trace import Reason

IdentityKey = Annotated[str, Meta(max_length=1024)]
"""`EmbedderIdentity.key()` in a changelog record. The model's name may be a directory's: up to 255 characters."""


class EmbedderIdentity(msgspec.Struct, frozen=True, omit_defaults=True):
    """The identity of an embedder. Vectors may only be compared if all fields except `runtime` agree."""

    name: str
    weights_sha256: str
    dimensions: int
    max_tokens: int
    runtime: str
    precision: str
    embed_text: str = "whole"  # which part of a trace is embedded (trace.py)
    objective_tokens: int = 0  # the limit for an objective that is embedded separately; 0: `max_tokens`

    def key(self) -> str:
        """Return the identity as one string, without the runtime (runtimes agree to 1e-6 in fp32)."""
        key = f"{self.name}:{self.weights_sha256}:{self.dimensions}:{self.max_tokens}:{self.precision}"
        return key if self.embed_text == "whole" else f"{key}:{self.embed_text}{self.objective_tokens or ''}"


ACCEPTED: Final = "accepted"
REJECTED: Final = "rejected"
REDRIVE_COUNT: Final = "kp-redrive-count"  # the header of a record that `redrive` sent again: how often

DEAD_LETTER: Final = "dead_letter"
JUDGED: Final = "judged"
ASSEMBLED: Final = "assembled"
SPANS: Final = "spans"

BATCH_OVERHEAD: Final = 61  # bytes of a record batch's header, which count towards max.message.bytes

RECORD_OVERHEAD: Final = 21 + 3 * 5
"""Most bytes of a record's own fields: attributes, and as varints the length, two deltas (timestamp, offset) and three
lengths (key, value, headers)."""

HEADER_OVERHEAD: Final = 2 * 5  # most bytes of one header's two lengths

Row = tuple[bytes, bytes | None]  # key and value of a changelog record; None is a tombstone

Headers = Sequence[tuple[str, bytes]]  # a producer may have sent null as a header's content


NO_FAULT_OF_A_RECORD: Final = (MemoryError, ImportError, OSError)
"""Errors of the machine or the installation. Any other Exception of a function that handles one record comes from that
record: retrying would raise it again and block every later record."""


def raised(error: BaseException) -> str:
    """Return an error's type and place, "IndexError (text.py:269)", without its message, which may quote the record."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    place = "" if at is None else f" ({at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno})"
    return f"{type(error).__name__}{place}"


class Fault(NamedTuple):
    """Why a fetched record, or the rest of its batch, cannot be used."""

    reason: Reason
    message: str
    first_offset: int | None = None  # of the records that this one stands for, up to its own offset


class SourceRecord(NamedTuple):
    """A record as read. A tuple, because one is created for every message."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    size: int = 0  # its `memory_size`
    fault: Fault | None = None  # makes it a dead letter, whatever it contains

    @property
    def time_ms(self) -> int:
        """Return its timestamp; -1 if it has none."""
        return -1 if self.timestamp_ms is None else self.timestamp_ms


LEVELS: Final = ("aggregated", "federated", "private")
"""The values of metadata.privacy_level. Secrets are removed at every level; `private` keeps personal data."""

TYPES: Final = ("connection_string", "bearer_token", "api_key", "password", "email", "phone", "ip", "filepath")
"""Marker types of the reference's rules, in the order of their patterns."""

STRICT_TYPES: Final = (
    *TYPES, "private_key", "basic_auth", "jwt", "cookie", "signed_url", "webhook", "card", "iban", "ssn",
)  # fmt: skip
"""Marker types of the strict rules."""

SCREEN_RULES: Final = (
    "bidi-override-chars", "zero-width-steganography", "direction-override", "tag-characters", "invisible-in-word",
)  # fmt: skip
"""The screening rules (KP_SCREEN)."""

SCREEN_HIDDEN: Final = frozenset({"direction-override", "tag-characters", "zero-width-steganography"})
"""Rules for hidden text that no language or emoji needs: KP_CONTRIBUTE_SCREEN=hidden."""


class Screening(msgspec.Struct, frozen=True):
    """The result of screening one document."""

    rules: tuple[str, ...]  # those that matched


Clean = Callable[[bytes], tuple[bytes, dict[str, int]]]
"""Returns a trace document (JSON) without secrets, and the number of markers by type. Raises InvalidTrace."""

Screen = Callable[[bytes], Screening]  # returns what the screen finds in a JSON document


class OutputRecord(msgspec.Struct, frozen=True):
    """A record to publish."""

    kind: str  # names its topic: `ACCEPTED`, `REJECTED` and so on
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]
    timestamp_ms: int | None
    redactions: dict[str, int] | None = None  # markers in the value, by type; None: it was not redacted
    screened: tuple[str, ...] = ()  # the screening rules that matched
    partition: int | None = None  # None: the source record's, modulo the topic's number of partitions


def encoded_size(key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]) -> int:
    """Return the most bytes that the record takes in a batch, without the batch's header."""
    size = RECORD_OVERHEAD + len(key or b"") + len(value or b"")
    for name, content in headers:
        size += HEADER_OVERHEAD + len(content or b"") + (len(name) if name.isascii() else len(name.encode()))
    return size


def memory_size(key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]) -> int:
    """Return about how many bytes of memory the record takes once read.

    A header's Python objects have 128, however short it is: 700,000 empty headers are 1.4 MB on the wire.
    """
    return encoded_size(key, value, headers) + 128 * len(headers)


def exact_size(key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]) -> int:
    """Return the bytes of an uncompressed batch of this one record, which Kafka compares with max.message.bytes.

    Slower than `encoded_size`, and never larger.
    """
    size = 3 + _nullable(key) + _nullable(value) + _varint(len(headers))  # attributes and two deltas of 0: a byte each
    for name, content in headers:
        length = len(name) if name.isascii() else len(name.encode())
        size += _varint(length) + length + _nullable(content)
    return BATCH_OVERHEAD + _varint(size) + size


def _varint(number: int) -> int:
    """Return the bytes of a zigzag varint of a number >= 0."""
    return max(1, (number.bit_length() + 7) // 7)


def _nullable(content: bytes | None) -> int:
    return 1 if content is None else _varint(len(content)) + len(content)
