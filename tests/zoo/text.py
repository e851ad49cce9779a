"""transformers: text encoders, language models, vision encoders."""

import torch
import transformers

from .base import add


def _add(cls_name, config_name, config, inputs, **kwargs):
    def construct():
        return getattr(transformers, cls_name)(getattr(transformers, config_name)(**config))

    add(cls_name, construct, inputs, library="transformers", **kwargs)


def _tokens(high):
    return lambda r: dict(input_ids=r.ids(high, 2, 7), attention_mask=r.ones(2, 7))


_T5 = dict(vocab_size=53, d_model=18, d_kv=6, d_ff=22, num_layers=3, num_heads=3)
_add("T5EncoderModel", "T5Config", _T5, _tokens(53))
_add("T5EncoderModel", "T5Config", dict(_T5, feed_forward_proj="gated-gelu"), _tokens(53), suffix="v1.1")
_add("UMT5EncoderModel", "UMT5Config", dict(_T5, feed_forward_proj="gated-gelu"), _tokens(53))

_CLIP = dict(hidden_size=18, intermediate_size=22, num_hidden_layers=3, num_attention_heads=3, projection_dim=14)
_CLIP_TEXT = dict(_CLIP, vocab_size=53, max_position_embeddings=9, bos_token_id=0, eos_token_id=1, pad_token_id=1)
_add("CLIPTextModel", "CLIPTextConfig", _CLIP_TEXT, _tokens(53))
_add("CLIPTextModelWithProjection", "CLIPTextConfig", _CLIP_TEXT, _tokens(53))
_add(
    "CLIPVisionModel",
    "CLIPVisionConfig",
    dict(_CLIP, image_size=12, patch_size=4),
    lambda r: dict(pixel_values=r(2, 3, 12, 12)),
)
_add(
    "CLIPVisionModelWithProjection",
    "CLIPVisionConfig",
    dict(_CLIP, image_size=12, patch_size=4),
    lambda r: dict(pixel_values=r(2, 3, 12, 12)),
)
_add(
    "BertModel",
    "BertConfig",
    dict(
        vocab_size=53,
        hidden_size=18,
        intermediate_size=22,
        num_hidden_layers=3,
        num_attention_heads=3,
        max_position_embeddings=11,
    ),
    _tokens(53),
)

_LM = dict(
    vocab_size=53,
    hidden_size=24,
    intermediate_size=34,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_add("LlamaForCausalLM", "LlamaConfig", dict(_LM, tie_word_embeddings=True), _tokens(53), suffix="tied")
_add("LlamaForCausalLM", "LlamaConfig", dict(_LM, tie_word_embeddings=False), _tokens(53), suffix="untied")
_add("Qwen2ForCausalLM", "Qwen2Config", _LM, _tokens(53))
_add("Qwen3ForCausalLM", "Qwen3Config", dict(_LM, head_dim=8, tie_word_embeddings=True), _tokens(53))
_add("MistralForCausalLM", "MistralConfig", _LM, _tokens(53))
_add("Gemma2Model", "Gemma2Config", dict(_LM, head_dim=8), _tokens(53))
_add("Gemma3ForCausalLM", "Gemma3TextConfig", dict(_LM, head_dim=8), _tokens(53))


# --- vision and language: their keys on disk differ from the live ones, or did at some time

_VISION = dict(
    hidden_size=18, intermediate_size=22, num_hidden_layers=3, num_attention_heads=3, image_size=8, patch_size=4
)
_TEXT = dict(_LM, vocab_size=60)


def _llava():
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_VISION),
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_index=59,
        image_seq_length=4,
    )
    return transformers.LlavaForConditionalGeneration(config)


add(
    "LlavaForConditionalGeneration",
    _llava,
    lambda r: dict(
        input_ids=torch.tensor([[3, 59, 59, 59, 59, 4, 5]]), pixel_values=r(1, 3, 8, 8), attention_mask=r.ones(1, 7)
    ),
    library="transformers",
)


def _qwen2_5_vl(tie):
    config = transformers.Qwen2_5_VLConfig(
        text_config=dict(
            _TEXT,
            head_dim=4,
            tie_word_embeddings=tie,
            rope_parameters=dict(rope_type="default", mrope_section=[1, 1, 0], rope_theta=10000.0),
        ),
        vision_config=dict(
            depth=3,
            hidden_size=24,
            intermediate_size=34,
            num_heads=3,
            patch_size=4,
            out_hidden_size=24,
            window_size=16,
            fullatt_block_indexes=[2],
            spatial_merge_size=2,
            temporal_patch_size=2,
        ),
        image_token_id=59,
        video_token_id=58,
        vision_start_token_id=57,
        vision_end_token_id=56,
        tie_word_embeddings=tie,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _qwen2_5_vl_inputs(r):
    ids = torch.tensor([[3, 57, 59, 59, 59, 59, 56, 5]])
    return dict(
        input_ids=ids,
        mm_token_type_ids=(ids == 59).long(),
        attention_mask=r.ones(1, 8),
        pixel_values=r(16, 3 * 2 * 4 * 4),
        image_grid_thw=torch.tensor([[1, 4, 4]]),
    )


add("Qwen2_5_VLForConditionalGeneration", lambda: _qwen2_5_vl(False), _qwen2_5_vl_inputs, library="transformers")
add(
    "Qwen2_5_VLForConditionalGeneration",
    lambda: _qwen2_5_vl(True),
    _qwen2_5_vl_inputs,
    library="transformers",
    suffix="tied",
)

# --- more text encoders of diffusion pipelines

_add(
    "GPT2LMHeadModel",
    "GPT2Config",
    dict(vocab_size=53, n_positions=16, n_embd=24, n_layer=3, n_head=3, bos_token_id=1, eos_token_id=2),
    _tokens(53),
)
_add(
    "MixtralForCausalLM",
    "MixtralConfig",
    dict(_LM, intermediate_size=40, num_local_experts=3, num_experts_per_tok=2),
    _tokens(53),
)
_add("SiglipVisionModel", "SiglipVisionConfig", _VISION, lambda r: dict(pixel_values=r(2, 3, 8, 8)))
_add(
    "T5ForConditionalGeneration",
    "T5Config",
    dict(_T5, pad_token_id=0, decoder_start_token_id=0),
    lambda r: dict(input_ids=r.ids(53, 2, 7), decoder_input_ids=r.ids(53, 2, 5)),
)

# --- the others that diffusers' pipelines name

_WITHOUT_TIE = dict(_LM, tie_word_embeddings=False)
_ROPE = dict(rope_type="default", mrope_section=[2, 1, 1], rope_theta=10000.0)
_MROPE = dict(_ROPE, mrope_section=[1, 1, 0])  # of heads of 4
_IDS = dict(image_token_id=59, video_token_id=58, vision_start_token_id=57, vision_end_token_id=56)


def _nested(cls_name, config_name, inputs, suffix="", **config):
    """A model of several parts, each with a config of its own."""

    def construct():
        return getattr(transformers, cls_name)(getattr(transformers, config_name)(**config))

    add(cls_name, construct, inputs, library="transformers", suffix=suffix)


_add("LlamaModel", "LlamaConfig", _WITHOUT_TIE, _tokens(53))
_add("MistralModel", "MistralConfig", dict(_WITHOUT_TIE, head_dim=8), _tokens(53))
_add("GemmaModel", "GemmaConfig", dict(_LM, head_dim=8), _tokens(53))
_add("Qwen3Model", "Qwen3Config", dict(_WITHOUT_TIE, head_dim=8), _tokens(53))
_add("GlmModel", "GlmConfig", dict(_WITHOUT_TIE, head_dim=8), _tokens(53))
_add("GPT2Model", "GPT2Config", dict(vocab_size=53, n_positions=16, n_embd=24, n_layer=3, n_head=3), _tokens(53))
_add("Qwen2_5_VLTextModel", "Qwen2_5_VLTextConfig", dict(_WITHOUT_TIE, rope_parameters=_MROPE), _tokens(53))

_GEMMA_TEXT = dict(_LM, vocab_size=60, head_dim=8, sliding_window=4)
_T5GEMMA = dict(_LM, head_dim=8, sliding_window=4)
_nested(
    "T5GemmaEncoderModel",
    "T5GemmaConfig",
    _tokens(53),
    encoder=_T5GEMMA,
    decoder=_T5GEMMA,
    is_encoder_decoder=False,
    vocab_size=53,
)
_nested(
    "Gemma3ForConditionalGeneration",
    "Gemma3Config",
    lambda r: dict(
        input_ids=torch.tensor([[3, 59, 59, 59, 59, 4, 5]]),
        token_type_ids=torch.tensor([[0, 1, 1, 1, 1, 0, 0]]),
        pixel_values=r(1, 3, 8, 8),
        attention_mask=r.ones(1, 7),
    ),
    text_config=_GEMMA_TEXT,
    vision_config=dict(_VISION, vision_use_head=False),
    image_token_index=59,
    boi_token_index=58,
    eoi_token_index=57,
    mm_tokens_per_image=4,
)
_nested(
    "Mistral3ForConditionalGeneration",
    "Mistral3Config",
    lambda r: dict(
        input_ids=torch.tensor([[3, 59, 59, 59, 59, 4, 5]]),
        pixel_values=r(1, 3, 16, 16),
        image_sizes=torch.tensor([[16, 16]]),
        attention_mask=r.ones(1, 7),
    ),
    text_config=dict(_WITHOUT_TIE, model_type="mistral", vocab_size=60, head_dim=8),
    vision_config=dict(
        model_type="pixtral",
        hidden_size=24,
        intermediate_size=34,
        num_hidden_layers=3,
        num_attention_heads=3,
        head_dim=8,
        image_size=16,
        patch_size=4,
    ),
    image_token_index=59,
    spatial_merge_size=2,
)
_QWEN_VISION = dict(depth=3, num_heads=3, patch_size=4, spatial_merge_size=2, temporal_patch_size=2, hidden_size=24)


_nested(
    "Qwen2VLForConditionalGeneration",
    "Qwen2VLConfig",
    _qwen2_5_vl_inputs,
    text_config=dict(_WITHOUT_TIE, vocab_size=60, rope_parameters=_MROPE),
    vision_config=dict(_QWEN_VISION, hidden_size=24, embed_dim=24, mlp_ratio=2),
    **_IDS,
)
for _name in ("Qwen3VLForConditionalGeneration", "Qwen3VLModel"):
    _nested(
        _name,
        "Qwen3VLConfig",
        _qwen2_5_vl_inputs,
        text_config=dict(_WITHOUT_TIE, vocab_size=60, head_dim=8, rope_parameters=_ROPE),
        vision_config=dict(
            _QWEN_VISION,
            intermediate_size=34,
            out_hidden_size=24,
            num_position_embeddings=16,
            deepstack_visual_indexes=[1],
        ),
        **_IDS,
    )

_add(
    "Siglip2VisionModel",
    "Siglip2VisionConfig",
    dict(_VISION, num_patches=4),
    lambda r: dict(
        pixel_values=r(2, 4, 48), pixel_attention_mask=r.ones(2, 4), spatial_shapes=torch.tensor([[2, 2], [2, 2]])
    ),
)
_nested(
    "SiglipModel",
    "SiglipConfig",
    lambda r: dict(input_ids=r.ids(53, 2, 7), pixel_values=r(2, 3, 8, 8)),
    text_config=dict(_VISION, vocab_size=53, max_position_embeddings=9, projection_size=18),
    vision_config=_VISION,
)
_nested(
    "CLIPModel",
    "CLIPConfig",
    lambda r: dict(input_ids=r.ids(53, 2, 7), pixel_values=r(2, 3, 8, 8)),
    text_config=dict(_CLIP_TEXT, hidden_size=18),
    vision_config=dict(_VISION, projection_dim=14),
    projection_dim=14,
)
_add("Dinov2Model", "Dinov2Config", _VISION, lambda r: dict(pixel_values=r(2, 3, 8, 8)))

# --- fp32 pins that hold in bf16 too: an embedding, a router and its buffer
_add(
    "VoxtralEncoder",
    "VoxtralEncoderConfig",
    dict(_VISION, num_mel_bins=6, max_source_positions=8, vocab_size=53, head_dim=6),
    lambda r: dict(input_features=r(1, 6, 16)),
)
_add(
    "DeepseekV3ForCausalLM",
    "DeepseekV3Config",
    dict(
        _WITHOUT_TIE,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        num_key_value_heads=6,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    ),
    _tokens(53),
)
