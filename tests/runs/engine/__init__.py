"""A Docker engine, its plugins and the base images for the checks that run containers."""
