"""kp-worker explain: how one score came about."""
