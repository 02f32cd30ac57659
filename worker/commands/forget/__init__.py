"""kp-worker forget: no later trace is compared with the forgotten ones."""
