"""kp-worker publish: the lines of a file become records of a topic."""
