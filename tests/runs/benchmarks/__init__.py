"""Benchmarks of the worker against itself and against what users would pick instead: `make bench`.

The parts are in `embedding` (a), `clients` (b, c), `costs` (d, f, g), `partitions` (e, j) and `handover` (h). Beside
them: the job that every peer does (`job`, `peers/`), what is read and checked (`workload`), how processes run and are
watched (`bench`), and how numbers become tables and goals (`results`).

To run all of it, install the peers (`pip install -e '.[bench]'`). `ARGS="--only a --seconds 5 --rounds 3"` runs a
part.

How the figures are made:

- The rows take turns within each round, and ratios are taken within a round, so that other work on the machine hits
  both sides. A figure is the median of the rounds, with the least and the most.
- A run that does not produce every output is an error, not a fast result. In part b every output must equal that of the
  reference job, byte for byte.
- Every peer does the same job with a record: the worker's own core. Only the Kafka side differs. The cache entry goes
  to the changelog topic as an ordinary record, in favour of the peers, who have no restore that would use it.
- A broker that has just started takes twice the CPU, so its JVM compiles what the runs need before anything is measured
  (`bench.warm`).

The parts:

- a) the embedder alone and the worker through Kafka, at 20, 50, 80 % and full load
- b), c) the same job by other clients, without and with the model
- d) one scan of the cache against a plain loop over numpy
- e) restore; f) several worker processes; g) memory and start
- h) how long a partition stands still, at 200 records/s without a model
- j) many partitions on one worker

docs/benchmarks.md shows the goals of all parts and the tables of part b.
"""
