"""kp-worker forget: traces that are to be compared with no more."""
