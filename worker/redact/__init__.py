"""Redaction and the screen, as pure as core/. The names of their findings are in core/records.py."""
