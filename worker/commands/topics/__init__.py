"""kp-worker topics: the topics as they are and as they should be."""
