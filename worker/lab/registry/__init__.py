"""A stand-in for the KnowledgePulse registry."""
