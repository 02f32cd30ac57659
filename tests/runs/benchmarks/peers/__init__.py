"""What users would pick instead, one small program each: `python -m tests.runs.benchmarks.peers.NAME --help`.

All do the same job (tests/runs/benchmarks/job.py) with the same command line (`options`), from the same source topic to
outputs of the same bytes. A peer is configured as its documentation recommends; where that is a choice, a comment
says so.
"""
