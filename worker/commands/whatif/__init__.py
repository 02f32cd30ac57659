"""kp-worker whatif: which decisions other settings would have changed."""
