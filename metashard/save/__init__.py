"""Save what was trained: a component as `save_pretrained` writes it, or an adapter alone, out of shards."""

from metashard.save.component import save_component
from metashard.save.lora import save_lora
from metashard.save.report import SaveReport

__all__ = ["SaveReport", "save_component", "save_lora"]
