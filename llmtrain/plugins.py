"""What a package needs to add an option of its own: see docs/plugins.md. Importing this is cheap and brings no torch."""

from llmtrain.config.declare import key
from llmtrain.config.plugins import Plugin

__all__ = ["Plugin", "key"]
