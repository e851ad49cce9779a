"""Families of pipelines: the libraries' own classes with the published hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Family:
    """A pipeline and its denoiser(s): the library's class with the published hyper-parameters."""

    pipeline: str
    cls: str
    config: dict[str, Any]
    text_encoder: str  # class name in transformers
    components: tuple[str, ...] = ("transformer",)  # each a model of `cls`, with weights of its own
    absent: tuple[str, ...] = ()  # written as [null, null] in model_index.json
    extra: dict[str, Any] = field(default_factory=dict)  # further entries of model_index.json
    scheduler: str = "FlowMatchEulerDiscreteScheduler"
    scheduler_config: dict[str, Any] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """Published depth in blocks (of the first list of blocks, where there are two)."""
        return int(self.config["num_layers"])

    def config_for(self, layers: int | None) -> dict[str, Any]:
        """The config at a depth of `layers` blocks; other lists of blocks keep their proportion to it."""
        config = dict(self.config)
        if layers is None:
            return config
        full = self.layers
        config["num_layers"] = layers
        if "num_single_layers" in config:
            config["num_single_layers"] = max(1, round(layers * config["num_single_layers"] / full))
        if "dual_attention_layers" in config:
            config["dual_attention_layers"] = tuple(i for i in config["dual_attention_layers"] if i < layers)
        return config


_SD3 = dict(
    sample_size=128,
    patch_size=2,
    in_channels=16,
    out_channels=16,
    attention_head_dim=64,
    joint_attention_dim=4096,
    pooled_projection_dim=2048,
    qk_norm="rms_norm",
)
_SD3_ABSENT = ("text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3", "vae")
_WAN = dict(
    patch_size=(1, 2, 2),
    attention_head_dim=128,
    in_channels=16,
    out_channels=16,
    text_dim=4096,
    freq_dim=256,
    cross_attn_norm=True,
    qk_norm="rms_norm_across_heads",
    eps=1e-6,
    image_dim=None,
    added_kv_proj_dim=None,
    rope_max_seq_len=1024,
)

FAMILIES = {
    "sd3.5-medium": Family(
        pipeline="StableDiffusion3Pipeline",
        cls="SD3Transformer2DModel",
        config=dict(
            _SD3,
            num_layers=24,
            num_attention_heads=24,
            caption_projection_dim=1536,
            pos_embed_max_size=384,
            dual_attention_layers=tuple(range(13)),
        ),
        text_encoder="CLIPTextModelWithProjection",
        absent=_SD3_ABSENT,
        scheduler_config=dict(shift=3.0),
    ),
    # Of no published model: SD3.5's structure at about 600 MB in bf16, for the demo.
    "sd3-small": Family(
        pipeline="StableDiffusion3Pipeline",
        cls="SD3Transformer2DModel",
        config=dict(
            _SD3,
            num_layers=7,
            num_attention_heads=16,
            caption_projection_dim=1024,
            pos_embed_max_size=96,
            dual_attention_layers=(0, 1, 2),
        ),
        text_encoder="CLIPTextModelWithProjection",
        absent=_SD3_ABSENT,
        scheduler_config=dict(shift=3.0),
    ),
    "qwen-image": Family(
        pipeline="QwenImagePipeline",
        cls="QwenImageTransformer2DModel",
        config=dict(
            patch_size=2,
            in_channels=64,
            out_channels=16,
            num_layers=60,
            attention_head_dim=128,
            num_attention_heads=24,
            joint_attention_dim=3584,
            guidance_embeds=False,
            axes_dims_rope=(16, 56, 56),
        ),
        text_encoder="CLIPTextModel",
        absent=("tokenizer", "vae"),
        scheduler_config=dict(shift=1.0, use_dynamic_shifting=True),
    ),
    "wan2.2-a14b": Family(
        pipeline="WanPipeline",
        cls="WanTransformer3DModel",
        config=dict(_WAN, num_attention_heads=40, ffn_dim=13824, num_layers=40),
        text_encoder="UMT5EncoderModel",
        components=("transformer", "transformer_2"),
        absent=("tokenizer", "vae"),
        extra=dict(boundary_ratio=0.875),
        scheduler="UniPCMultistepScheduler",
        scheduler_config=dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    ),
    "wan2.1-t2v-1.3b": Family(
        pipeline="WanPipeline",
        cls="WanTransformer3DModel",
        config=dict(_WAN, num_attention_heads=12, ffn_dim=8960, num_layers=30),
        text_encoder="UMT5EncoderModel",
        absent=("tokenizer", "vae"),
        scheduler="UniPCMultistepScheduler",
        scheduler_config=dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    ),
    "ltx-2": Family(
        pipeline="LTX2Pipeline",
        cls="LTX2VideoTransformer3DModel",
        config=dict(
            in_channels=128,
            out_channels=128,
            patch_size=1,
            patch_size_t=1,
            num_attention_heads=32,
            attention_head_dim=128,
            cross_attention_dim=4096,
            audio_in_channels=128,
            audio_out_channels=128,
            audio_num_attention_heads=32,
            audio_attention_head_dim=64,
            audio_cross_attention_dim=2048,
            num_layers=48,
            caption_channels=3840,
            rope_type="split",
        ),
        text_encoder="CLIPTextModel",
        absent=("tokenizer", "vae", "audio_vae", "connectors", "vocoder"),
        scheduler_config=dict(shift=1.0, use_dynamic_shifting=True),
    ),
    "flux": Family(
        pipeline="FluxPipeline",
        cls="FluxTransformer2DModel",
        config=dict(
            patch_size=1,
            in_channels=64,
            num_layers=19,
            num_single_layers=38,
            attention_head_dim=128,
            num_attention_heads=24,
            joint_attention_dim=4096,
            pooled_projection_dim=768,
            guidance_embeds=True,
            axes_dims_rope=(16, 56, 56),
        ),
        text_encoder="CLIPTextModel",
        absent=("text_encoder_2", "tokenizer", "tokenizer_2", "vae"),
        scheduler_config=dict(shift=3.0, use_dynamic_shifting=True),
    ),
    "hunyuan-video": Family(
        pipeline="HunyuanVideoPipeline",
        cls="HunyuanVideoTransformer3DModel",
        config=dict(
            in_channels=16,
            out_channels=16,
            num_attention_heads=24,
            attention_head_dim=128,
            num_layers=20,
            num_single_layers=40,
            num_refiner_layers=2,
            mlp_ratio=4.0,
            patch_size=2,
            patch_size_t=1,
            qk_norm="rms_norm",
            guidance_embeds=True,
            text_embed_dim=4096,
            pooled_projection_dim=768,
            rope_theta=256.0,
            rope_axes_dim=(16, 56, 56),
        ),
        text_encoder="CLIPTextModel",
        absent=("text_encoder_2", "tokenizer", "tokenizer_2", "vae"),
        scheduler_config=dict(shift=7.0),
    ),
}


def write_text_encoder(folder: Path, cls_name: str, dtype: torch.dtype, seed: int, variant: str | None) -> None:
    """A small text encoder of the kind the pipeline uses: two layers, random weights."""
    import transformers

    if cls_name == "UMT5EncoderModel":
        config: Any = transformers.UMT5Config(
            vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_decoder_layers=2, num_heads=4
        )
    else:
        config = transformers.CLIPTextConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            projection_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=77,
            bos_token_id=0,
            eos_token_id=511,
            pad_token_id=1,
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, cls_name)(config).to(dtype)
    model.save_pretrained(folder, variant=variant)


def model_index(family: Family, version: str) -> dict[str, Any]:
    """What the pipeline's model_index.json says."""
    entries: dict[str, Any] = {name: [None, None] for name in family.absent}
    entries.update({name: ["diffusers", family.cls] for name in family.components})
    entries["text_encoder"] = ["transformers", family.text_encoder]
    entries["scheduler"] = ["diffusers", family.scheduler]
    entries.update(family.extra)
    return {"_class_name": family.pipeline, "_diffusers_version": version, **dict(sorted(entries.items()))}
