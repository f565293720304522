"""llmtrain: pretrain language models, and know what fits, what it costs and whether it is right."""

__version__ = "0.1.0"
