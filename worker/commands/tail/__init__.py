"""kp-worker tail: scored traces as they arrive."""
