"""Apache Kafka on one machine, for the demo and the tests."""
