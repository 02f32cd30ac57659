"""kp-worker report: a page about the scores of many traces."""
