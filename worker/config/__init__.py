"""Settings: a config file, environment variables (KP_...) and options, read and checked once at start.

settings.py lists the settings, loading.py says where their values come from. Nothing else in worker/ reads a KP_
variable or the config file.
"""

from worker.config.errors import ConfigError
from worker.config.loading import Loaded, load, read
from worker.config.settings import Settings, describe
from worker.config.sources import PREFIX

__all__ = ["PREFIX", "ConfigError", "Loaded", "Settings", "describe", "load", "read"]
