"""Sessions of coding agents, as they are left on disk: line by line, each request of the user a run."""
