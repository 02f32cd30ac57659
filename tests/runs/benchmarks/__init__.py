"""Benchmarks of the worker against itself and against what users would pick instead: `make bench`.

Each part of the measurement is one module (`embedding`, `clients`, `scan`, `restore`, `processes`, `footprint`).
Lives here beside them: the job that every peer does (`job`, `peers/`), what is read and checked (`workload`), how a
process is watched (`watch`), how numbers become tables, goals and plots (`results`, `plot`).
"""
