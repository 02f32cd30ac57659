"""The identity of an embedder. Two vectors may only be compared if their identities agree."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

IdentityKey = Annotated[str, Meta(max_length=1024)]
"""`EmbedderIdentity.key()` in a record of the changelog; the model's name is that of a directory, 255 characters."""


class EmbedderIdentity(msgspec.Struct, frozen=True, omit_defaults=True):
    """The identity of an embedder. Two vectors may only be compared if all fields but `runtime` agree.

    `long_texts`: the handling of a text of more than `max_tokens`; not written if it was truncated. `embed_text`: what
    of a trace was embedded (views.py); not written for its whole text.
    """

    name: str
    weights_sha256: str
    dimensions: int
    max_tokens: int
    runtime: str
    precision: str
    long_texts: str = "cut"
    embed_text: str = "whole"

    def key(self) -> str:
        """Return the identity as one string, without the runtime (runtimes agree to 1e-6 in fp32)."""
        key = f"{self.name}:{self.weights_sha256}:{self.dimensions}:{self.max_tokens}:{self.precision}"
        if self.long_texts != "cut":
            key = f"{key}:{self.long_texts}"
        return key if self.embed_text == "whole" else f"{key}:{self.embed_text}"
