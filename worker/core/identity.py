"""What made an embedding. Two vectors may only be compared when these agree."""

from __future__ import annotations

import msgspec


class EmbedderIdentity(msgspec.Struct, frozen=True, omit_defaults=True):
    """What made an embedding. Two vectors may only be compared when all but `runtime` agree.

    `long_texts`: what was done with a text of more than `max_tokens`; not written where it was cut.
    """

    name: str
    weights_sha256: str
    dimensions: int
    max_tokens: int
    runtime: str
    precision: str
    long_texts: str = "cut"

    def key(self) -> str:
        """Return the identity as one string, without the runtime (runtimes agree to 1e-6 in fp32)."""
        key = f"{self.name}:{self.weights_sha256}:{self.dimensions}:{self.max_tokens}:{self.precision}"
        return key if self.long_texts == "cut" else f"{key}:{self.long_texts}"
