"""A module or package for each command, with its views."""
