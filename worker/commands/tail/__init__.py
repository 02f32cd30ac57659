"""kp-worker tail: scored traces as they come."""
