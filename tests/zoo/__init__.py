"""A small model for every model class that diffusers exports, and for the usual text encoders of transformers.

Parity tests save `CASES[name].build()`, load the folder both ways and compare; see `Case` and `run_forward`.
Classes that no case covers are in `EXCLUDED` with the reason; tests/test_zoo.py keeps the two complete.
"""

from . import audio, autoencoders, image, text, unets, video  # noqa: F401  (each fills CASES as it is imported)
from .base import CASES, EXCLUDED, Case, run_forward

CORE: tuple[str, ...] = (
    "SD3Transformer2DModel",
    "FluxTransformer2DModel",
    "QwenImageTransformer2DModel",
    "WanTransformer3DModel",
    "LTX2VideoTransformer3DModel",
    "HunyuanVideoTransformer3DModel",
    "UNet2DConditionModel",
    "AutoencoderKL",
    "ControlNetModel",
    "T5EncoderModel",
    "CLIPTextModel",
    "BertModel",
    "LlamaForCausalLM-tied",
)

__all__ = ["CASES", "CORE", "EXCLUDED", "Case", "run_forward"]
