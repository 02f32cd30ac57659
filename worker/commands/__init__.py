"""One module for each command but `run`, with its views."""
