"""Sessions of coding agents as stored on disk: read line by line; each request of the user is a run."""
