"""kp-worker doctor: problems of a deployment, and their remedies."""
