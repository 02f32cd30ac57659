"""`kp-worker redrive` with small transactions, and killed at an exact step: `python -m tests.support.crash_redrive`.

TEST_CRASH_AT as in tests/support/crash_worker.py, whose producer this puts below the command.
"""

from typing import Any

from tests.support.crash_worker import SteppedProducer
from worker import cli
from worker.commands.redrive import steps


def main() -> None:
    """Run the command line with the doubles at their seams."""
    module: Any = steps
    module.Producer = SteppedProducer
    module.MAX_RECORDS = 7  # letters in one transaction: there are many to be killed in
    cli.main()


if __name__ == "__main__":
    main()
