"""kp-worker run, contribute and assemble."""
