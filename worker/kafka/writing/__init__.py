"""Writing: a producer and its protocol, transactions, and what the worker publishes for a batch."""
