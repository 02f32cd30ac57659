"""A stand-in for the KnowledgePulse registry, on one machine, for the demo and the tests."""
