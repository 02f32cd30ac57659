"""kp-worker score: the lines of a file, scored as the worker scores a topic."""
