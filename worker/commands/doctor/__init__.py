"""kp-worker doctor: what is wrong with a deployment, and what to do."""
