"""kp-worker evaluate: how well novelty tells repeated tasks from new ones."""
