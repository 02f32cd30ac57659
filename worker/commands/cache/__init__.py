"""kp-worker cache: the contents of the caches, and the entries nearest to a trace."""
