"""kp-worker cache: what is in the caches, and what is nearest to a trace."""
