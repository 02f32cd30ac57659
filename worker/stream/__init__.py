"""The stream processor: consumer, assignment, order, commits, the process."""
