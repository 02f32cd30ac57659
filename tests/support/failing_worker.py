"""`kp-worker` with a redaction that fails on records that say so: python -m tests.support.failing_worker run."""

from typing import Any

import worker.contribute.unit
import worker.redact.documents
from worker.cli import main

FAILS = "the rule fails here"


def _failing(real: Any) -> Any:
    def redact(document: Any, *arguments: Any, **named: Any) -> Any:
        if FAILS in (document if isinstance(document, str) else repr(document)):
            raise IndexError(FAILS)
        return real(document, *arguments, **named)

    return redact


if __name__ == "__main__":
    for module, name in (
        (worker.redact.documents, "redact_json"),
        (worker.contribute.unit, "redact_document"),
        (worker.contribute.unit, "redact_text"),
    ):
        setattr(module, name, _failing(getattr(module, name)))
    main()
