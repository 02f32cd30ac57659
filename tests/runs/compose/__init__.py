"""`make compose-test`: docker-compose.yml as it is, on a Docker engine, with real load, restarts and limits."""
