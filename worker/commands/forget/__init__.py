"""kp-worker forget: no later trace is compared with these any more."""
