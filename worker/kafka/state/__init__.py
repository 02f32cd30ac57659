"""State: what a partition resumes from, read from committed offsets and the changelog."""
