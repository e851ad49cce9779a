"""A new LoRA adapter, as a trainer would add one: the same for every flow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

INITS = ("gaussian", "true", "orthogonal")


@dataclass(frozen=True)
class Adapter:
    """LoRA on the attention projections.

    Args:
        rank: Of the adapter; its alpha is the same.
        init: As peft's `init_lora_weights` takes it; one that looks at no base weights.
        seed: Of torch's CPU generator, set just before the adapter is made.
    """

    rank: int = 64
    init: str = "gaussian"
    seed: int = 0

    def config(self) -> Any:
        """As peft takes it."""
        from peft import LoraConfig

        from metashard.verify_lora import ATTENTION

        init = True if self.init == "true" else self.init
        return LoraConfig(r=self.rank, lora_alpha=self.rank, init_lora_weights=init, target_modules=ATTENTION)

    def add(self, module: nn.Module, *, meta: bool = False) -> nn.Module:
        """peft's own call; with `meta` the adapter has no values either."""
        from peft import get_peft_model

        torch.manual_seed(self.seed)
        return get_peft_model(module, self.config(), low_cpu_mem_usage=meta)
