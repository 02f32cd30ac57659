"""kp-worker demo."""
