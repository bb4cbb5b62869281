"""Drafters as folders that others load, and those folders read back."""

from trainer.export.reading import Served, read
from trainer.export.speculators import export_speculators
from trainer.export.zlab import export, served_config, tensor_names

__all__ = ["Served", "export", "export_speculators", "read", "served_config", "tensor_names"]
