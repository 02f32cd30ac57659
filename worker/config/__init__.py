"""Settings: a config file, environment variables (KP_...) and options, read and checked once at start.

settings.py lists the settings, loading.py says where their values come from. Nothing else in worker/ reads a KP_
variable or the config file.
"""

from worker.config.loading import ConfigError, Loaded, load, read
from worker.config.settings import PREFIX, Settings, describe

__all__ = ["PREFIX", "ConfigError", "Loaded", "Settings", "describe", "load", "read"]
