"""diffusers transformers for video."""

import torch

from .base import add

# --- the named families

_WAN = dict(
    patch_size=(1, 2, 2),
    num_attention_heads=2,
    attention_head_dim=12,
    in_channels=4,
    out_channels=4,
    text_dim=18,
    freq_dim=32,
    ffn_dim=34,
    num_layers=3,
    cross_attn_norm=True,
    rope_max_seq_len=32,
)


def _wan(r, channels=4):
    return dict(hidden_states=r(1, channels, 2, 8, 8), timestep=r.ids(1000, 1), encoder_hidden_states=r(1, 6, 18))


add("WanTransformer3DModel", _WAN, _wan)
add(
    "WanTransformer3DModel",
    dict(_WAN, image_dim=14, added_kv_proj_dim=24, pos_embed_seq_len=10),
    lambda r: dict(_wan(r), encoder_hidden_states_image=r(2, 5, 14)),
    suffix="i2v",
)
_LTX2 = dict(
    in_channels=6,
    out_channels=6,
    num_attention_heads=2,
    attention_head_dim=12,
    cross_attention_dim=24,
    audio_in_channels=5,
    audio_out_channels=5,
    audio_num_attention_heads=2,
    audio_attention_head_dim=6,
    audio_cross_attention_dim=12,
    num_layers=3,
    caption_channels=18,
)
add(
    "LTX2VideoTransformer3DModel",
    _LTX2,
    lambda r: dict(
        hidden_states=r(1, 2 * 4 * 4, 6),
        audio_hidden_states=r(1, 9, 5),
        encoder_hidden_states=r(1, 7, 18),
        audio_encoder_hidden_states=r(1, 7, 18),
        timestep=r.unit(1, 32) * 1000,
        audio_timestep=r.unit(1, 9) * 1000,
        encoder_attention_mask=r.ones(1, 7),
        audio_encoder_attention_mask=r.ones(1, 7),
        num_frames=2,
        height=4,
        width=4,
        audio_num_frames=9,
        fps=25.0,
    ),
)
_HUNYUAN_VIDEO = dict(
    in_channels=4,
    out_channels=4,
    num_attention_heads=3,
    attention_head_dim=10,
    num_layers=2,
    num_single_layers=2,
    num_refiner_layers=1,
    mlp_ratio=2.5,
    patch_size=1,
    patch_size_t=1,
    guidance_embeds=True,
    text_embed_dim=18,
    pooled_projection_dim=14,
    rope_axes_dim=(2, 4, 4),
)
add(
    "HunyuanVideoTransformer3DModel",
    _HUNYUAN_VIDEO,
    lambda r: dict(
        hidden_states=r(1, 4, 1, 9, 9),
        timestep=r.ids(1000, 1),
        encoder_hidden_states=r(1, 8, 18),
        encoder_attention_mask=r.ones(1, 8),
        pooled_projections=r(1, 14),
        guidance=r.full(6.0, 1),
    ),
)

# --- relatives of Wan

_WAN_VACE = dict(_WAN, vace_layers=[0, 2], vace_in_channels=6)
add(
    "WanVACETransformer3DModel",
    _WAN_VACE,
    lambda r: dict(_wan(r), control_hidden_states=r(1, 6, 2, 8, 8), control_hidden_states_scale=r.full(1, 2)),
)
add(
    "WanAnimateTransformer3DModel",
    dict(
        _WAN,
        num_layers=4,
        in_channels=12,
        latent_channels=4,
        image_dim=14,
        added_kv_proj_dim=24,
        motion_encoder_channel_sizes={"4": 6, "8": 6, "16": 5},
        motion_encoder_size=16,
        motion_style_dim=10,
        motion_dim=3,
        motion_encoder_dim=10,
        face_encoder_hidden_dim=12,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    ),
    lambda r: dict(
        _wan(r, 12) | dict(hidden_states=r(1, 12, 3, 8, 8)),
        encoder_hidden_states_image=r(1, 5, 14),
        pose_hidden_states=r(1, 4, 2, 8, 8),
        face_pixel_values=r(1, 3, 5, 16, 16),
    ),
)
add(
    "WanAnimate2Transformer3DModel",
    dict(
        text_len=6,
        in_dim=12,
        dim=24,
        ffn_dim=34,
        freq_dim=32,
        text_dim=18,
        out_dim=4,
        num_heads=2,
        num_layers=3,
        use_img_emb=False,
    ),  # the image branch is 1280 wide
    lambda r: dict(
        hidden_states=[r(4, 1, 8, 8)],
        timestep=r.ids(1000, 1),
        encoder_hidden_states=[r(5, 18)],
        condition_latents=[r(8, 1, 8, 8)],
        kv_cache=_wan_animate_cache(),
        kv_cache_mode="extract",
        seq_len=16,
        offset_grid_sizes=torch.tensor([[1, 4, 4]]),
    ),
)


def _wan_animate_cache():
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    return WanAnimate2KVCache(num_layers=3)


add(
    "ChronoEditTransformer3DModel",
    dict(_WAN, image_dim=14, added_kv_proj_dim=24),
    lambda r: dict(_wan(r), encoder_hidden_states_image=r(1, 5, 14)),
)
add("SkyReelsV2Transformer3DModel", _WAN, _wan)
add(
    "SkyReelsV2Transformer3DModel",
    dict(_WAN, inject_sample_info=True),
    lambda r: dict(_wan(r), fps=r.ids(2, 1)),
    suffix="fps",
)
add(
    "AnyFlowTransformer3DModel",
    _WAN,
    lambda r: dict(
        hidden_states=r(1, 2, 4, 8, 8),
        timestep=r.unit(1, 2) * 1000,
        r_timestep=r.unit(1, 2) * 1000,
        encoder_hidden_states=r(1, 6, 18),
    ),
)
add(
    "AnyFlowFARTransformer3DModel",
    dict(_WAN, full_chunk_limit=2, chunk_partition=(1, 1)),
    lambda r: dict(
        hidden_states=r(1, 2, 4, 8, 8),
        timestep=r.unit(1, 2) * 1000,
        r_timestep=r.unit(1, 2) * 1000,
        encoder_hidden_states=r(1, 6, 18),
        chunk_partition=[1, 1],
    ),
)
add(
    "HeliosTransformer3DModel",
    {key: value for key, value in _WAN.items() if key != "rope_max_seq_len"} | dict(rope_dim=(4, 4, 4)),
    lambda r: dict(
        _wan(r),
        indices_hidden_states=torch.arange(2)[None],
        indices_latents_history_short=torch.arange(1)[None],
        latents_history_short=r(1, 4, 1, 8, 8),
        indices_latents_history_mid=torch.arange(2)[None],
        latents_history_mid=r(1, 4, 2, 8, 8),
        indices_latents_history_long=torch.arange(4)[None],
        latents_history_long=r(1, 4, 4, 8, 8),
    ),
)

# --- relatives of LTX and HunyuanVideo

add(
    "LTXVideoTransformer3DModel",
    dict(
        in_channels=6,
        out_channels=6,
        num_attention_heads=2,
        attention_head_dim=12,
        cross_attention_dim=24,
        num_layers=3,
        caption_channels=18,
    ),
    lambda r: dict(
        hidden_states=r(2, 32, 6),
        encoder_hidden_states=r(2, 7, 18),
        timestep=r.ids(1000, 2),
        encoder_attention_mask=r.ones(2, 7),
        num_frames=2,
        height=4,
        width=4,
    ),
)
add(
    "LTX2VideoTransformer3DModel",
    dict(
        _LTX2,
        gated_attn=True,
        audio_gated_attn=True,
        cross_attn_mod=True,
        audio_cross_attn_mod=True,
        perturbed_attn=True,
        rope_type="split",
        ff_bias=False,
        audio_ff_bias=False,
    ),
    lambda r: dict(
        hidden_states=r(1, 32, 6),
        audio_hidden_states=r(1, 9, 5),
        encoder_hidden_states=r(1, 7, 18),
        audio_encoder_hidden_states=r(1, 7, 18),
        timestep=r.unit(1, 32) * 1000,
        audio_timestep=r.unit(1, 9) * 1000,
        sigma=r.unit(1) * 1000,
        audio_sigma=r.unit(1) * 1000,
        encoder_attention_mask=r.ones(1, 7),
        audio_encoder_attention_mask=r.ones(1, 7),
        num_frames=2,
        height=4,
        width=4,
        audio_num_frames=9,
        fps=25.0,
    ),
    suffix="2.3",
)
add(
    "SanaWMLTX2RefinerTransformer3DModel",
    _LTX2,
    lambda r: dict(
        hidden_states=r(1, 32, 6),
        encoder_hidden_states=r(1, 7, 18),
        timestep=r.unit(1, 32) * 1000,
        video_rotary_emb=(r.unit(1, 32, 24), r.unit(1, 32, 24)),
        encoder_attention_mask=r.ones(1, 7),
    ),
)
add(
    "HunyuanVideoTransformer3DModel",
    dict(_HUNYUAN_VIDEO, image_condition_type="token_replace"),
    lambda r: dict(
        hidden_states=r(1, 4, 2, 6, 6),
        timestep=r.ids(1000, 1),
        encoder_hidden_states=r(1, 8, 18),
        encoder_attention_mask=r.ones(1, 8),
        pooled_projections=r(1, 14),
        guidance=r.full(6.0, 1),
    ),
    suffix="token-replace",
)
add(
    "HunyuanVideoFramepackTransformer3DModel",
    dict(_HUNYUAN_VIDEO, patch_size=2, has_image_proj=True, image_proj_dim=14, has_clean_x_embedder=True),
    lambda r: dict(
        hidden_states=r(1, 4, 3, 4, 4),
        timestep=r.ids(1000, 1),
        encoder_hidden_states=r(1, 8, 18),
        encoder_attention_mask=r.ones(1, 8),
        pooled_projections=r(1, 14),
        guidance=r.full(6.0, 1),
        image_embeds=r(1, 5, 14),
        indices_latents=r.ids(9, 3),
        latents_clean=r(1, 4, 2, 4, 4),
        indices_latents_clean=r.ids(9, 2),
        latents_history_2x=r(1, 4, 2, 4, 4),
        indices_latents_history_2x=r.ids(9, 2),
        latents_history_4x=r(1, 4, 4, 8, 8),
        indices_latents_history_4x=r.ids(9, 4),
    ),
)
add(
    "HunyuanVideo15Transformer3DModel",
    # 17 MB: the projection of the second text encoder is 2048 wide in every configuration
    dict(
        in_channels=4,
        out_channels=4,
        num_attention_heads=3,
        attention_head_dim=10,
        num_layers=3,
        num_refiner_layers=2,
        mlp_ratio=2.5,
        text_embed_dim=18,
        text_embed_2_dim=14,
        image_embed_dim=12,
        rope_axes_dim=(2, 4, 4),
        target_size=16,
    ),
    lambda r: dict(
        hidden_states=r(1, 4, 2, 6, 6),
        timestep=r.unit(1) * 1000,
        encoder_hidden_states=r(1, 8, 18),
        encoder_attention_mask=r.ones(1, 8),
        encoder_hidden_states_2=r(1, 6, 14),
        encoder_attention_mask_2=r.ones(1, 6),
        image_embeds=r(1, 5, 12),
    ),
)
add(
    "MotifVideoTransformer3DModel",
    dict(
        in_channels=5,
        out_channels=4,
        num_attention_heads=3,
        attention_head_dim=10,
        num_layers=2,
        num_single_layers=3,
        num_decoder_layers=1,
        mlp_ratio=2.5,
        text_embed_dim=18,
        image_embed_dim=14,
        rope_axes_dim=(2, 4, 4),
        enable_text_cross_attention_dual=True,
        enable_text_cross_attention_single=True,
    ),
    lambda r: dict(
        hidden_states=r(1, 5, 2, 8, 8),
        timestep=r.ids(1000, 1),
        encoder_hidden_states=r(1, 8, 18),
        encoder_attention_mask=r.ones(1, 8),
        image_embeds=r(1, 5, 14),
    ),
)

# --- other text-to-video DiTs


def _video(r, channels=4, dim=18):
    return dict(hidden_states=r(1, channels, 2, 8, 8), timestep=r.ids(1000, 1), encoder_hidden_states=r(1, 6, dim))


def _frames_first(r):
    return dict(hidden_states=r(1, 3, 4, 8, 8), timestep=r.ids(1000, 1), encoder_hidden_states=r(1, 6, 18))


_COGVIDEOX = dict(
    num_attention_heads=2,
    attention_head_dim=16,
    in_channels=4,
    out_channels=4,
    time_embed_dim=14,
    text_embed_dim=18,
    num_layers=3,
    sample_width=8,
    sample_height=8,
    sample_frames=9,
    patch_size=2,
    temporal_compression_ratio=4,
    max_text_seq_length=6,
)
add("CogVideoXTransformer3DModel", _COGVIDEOX, _frames_first)
add(
    "CogVideoXTransformer3DModel",
    dict(
        _COGVIDEOX,
        use_rotary_positional_embeddings=True,
        patch_size_t=2,
        ofs_embed_dim=14,
        sample_frames=4,
        temporal_compression_ratio=1,
        patch_bias=False,
    ),
    lambda r: dict(
        _frames_first(r) | dict(hidden_states=r(1, 4, 4, 8, 8)),
        ofs=r.full(2.0, 1),
        image_rotary_emb=(r.unit(32, 16), r.unit(32, 16)),
    ),
    suffix="1.5",
)
add(
    "CogVideoXTransformer3DModel",
    dict(_COGVIDEOX, use_rotary_positional_embeddings=True, use_learned_positional_embeddings=True),
    lambda r: dict(_frames_first(r), image_rotary_emb=(r.unit(48, 16), r.unit(48, 16))),
    suffix="i2v",
)
add(
    "ConsisIDTransformer3DModel",
    dict(
        {key: value for key, value in _COGVIDEOX.items() if key != "patch_size_t"},
        is_train_face=True,
        cross_attn_interval=1,
        cross_attn_dim_head=4,
        cross_attn_num_heads=2,
        LFE_id_dim=10,
        LFE_vit_dim=14,
        LFE_depth=5,
        LFE_dim_head=4,
        LFE_num_heads=2,
        LFE_num_id_token=2,
        LFE_num_querie=3,
        LFE_output_dim=21,
        LFE_ff_mult=2,
        LFE_num_scale=5,
    ),
    lambda r: dict(_frames_first(r), id_cond=r(1, 10), id_vit_hidden=[r(1, 4, 14) for _ in range(5)]),
)
_COSMOS = dict(
    in_channels=4,
    out_channels=4,
    num_attention_heads=2,
    attention_head_dim=18,
    num_layers=3,
    mlp_ratio=1.5,
    text_embed_dim=18,
    adaln_lora_dim=5,
    max_size=(4, 16, 16),
    concat_padding_mask=False,
)
add("CosmosTransformer3DModel", dict(_COSMOS, extra_pos_embed_type="learnable"), lambda r: dict(_video(r), fps=30))
add(
    "CosmosTransformer3DModel",
    dict(
        _COSMOS,
        extra_pos_embed_type=None,
        use_crossattn_projection=True,
        crossattn_proj_in_channels=14,
        encoder_hidden_states_channels=18,
        img_context_dim_in=12,
        img_context_num_tokens=4,
        img_context_dim_out=36,
    ),
    lambda r: dict(_video(r) | dict(encoder_hidden_states=(r(1, 6, 14), r(1, 4, 12))), fps=30),
    suffix="2.5",
)
add(
    "CosmosControlNetModel",
    dict(
        n_controlnet_blocks=2,
        in_channels=11,
        latent_channels=5,
        model_channels=36,
        num_attention_heads=2,
        attention_head_dim=18,
        mlp_ratio=1.5,
        text_embed_dim=18,
        adaln_lora_dim=5,
        max_size=(4, 16, 16),
        img_context_dim_in=None,
        img_context_dim_out=18,
        encoder_hidden_states_channels=18,
    ),
    None,
)  # its forward always resizes a mask with torchvision, which is not among our dependencies
_COSMOS3 = dict(
    head_dim=12,
    hidden_size=36,
    intermediate_size=34,
    latent_channel=4,
    num_attention_heads=3,
    num_hidden_layers=3,
    num_key_value_heads=1,
    patch_latent_dim=16,
    vocab_size=53,
    rope_axes_dim=(2, 2, 2),
)
add(
    "Cosmos3OmniTransformer",
    _COSMOS3,
    lambda r: dict(
        input_ids=r.ids(53, 5),
        text_indexes=torch.arange(5),
        position_ids=r.ids(9, 3, 13),
        und_len=5,
        sequence_length=13,
        vision_tokens=[r(1, 4, 2, 4, 4)],
        vision_token_shapes=[(2, 2, 2)],
        vision_sequence_indexes=torch.arange(5, 13),
        vision_mse_loss_indexes=torch.arange(5, 13),
        vision_timesteps=r.full(500.0, 8),
        vision_noisy_frame_indexes=[torch.arange(2)],
    ),
)
add(
    "EasyAnimateTransformer3DModel",
    dict(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        patch_size=2,
        sample_width=8,
        sample_height=8,
        num_layers=3,
        mmdit_layers=2,
        time_embed_dim=14,
        text_embed_dim=18,
        add_norm_text_encoder=True,
    ),
    _video,
)
add(
    "LatteTransformer3DModel",
    dict(
        num_attention_heads=3,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=3,
        cross_attention_dim=24,
        attention_bias=True,
        sample_size=8,
        patch_size=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        caption_channels=18,
        video_length=2,
    ),
    _video,
)
add(
    "AllegroTransformer3DModel",
    dict(
        num_attention_heads=3,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        cross_attention_dim=36,
        sample_height=8,
        sample_width=8,
        sample_frames=2,
        caption_channels=18,
    ),
    lambda r: dict(_video(r), attention_mask=r.ones(1, 2, 8, 8), image_rotary_emb=_allegro_rope(r)),
)
add(
    "MochiTransformer3DModel",
    dict(
        num_attention_heads=3,
        attention_head_dim=8,
        num_layers=3,
        pooled_projection_dim=10,
        in_channels=4,
        text_embed_dim=24,
        time_embed_dim=14,
        max_sequence_length=6,
    ),
    lambda r: dict(_video(r, dim=24), encoder_attention_mask=r.ones(1, 6, dtype=torch.bool)),
)
add(
    "SanaVideoTransformer3DModel",
    dict(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=3,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=18,
        mlp_ratio=2.5,
        sample_size=8,
        rope_max_seq_len=32,
    ),
    _video,
)
add(
    "SanaWMTransformer3DModel",
    dict(
        in_channels=4,
        num_layers=4,
        hidden_size=24,
        num_attention_heads=2,
        softmax_every_n=2,
        linear_head_dim=12,
        chunk_plucker_channels=6,
        chunk_plucker_post_attn_blocks=2,
        caption_channels=18,
        mlp_ratio=2.0,
    ),
    lambda r: dict(_video(r) | dict(timestep=r.ids(1000, 1, 1, 2)), mask=r.ones(1, 6), chunk_plucker=r(1, 6, 2, 8, 8)),
)
_KANDINSKY = dict(
    in_visual_dim=4,
    out_visual_dim=4,
    in_text_dim=18,
    in_text_dim2=14,
    time_dim=22,
    model_dim=24,
    ff_dim=34,
    num_text_blocks=2,
    num_visual_blocks=3,
    axes_dims=(4, 4, 4),
)
add(
    "Kandinsky5Transformer3DModel",
    _KANDINSKY,
    lambda r: dict(
        hidden_states=r(1, 2, 8, 8, 4),
        encoder_hidden_states=r(1, 6, 18),
        timestep=r.unit(1) * 1000,
        pooled_projections=r(1, 14),
        visual_rope_pos=[torch.arange(2), torch.arange(4), torch.arange(4)],
        text_rope_pos=torch.arange(6),
    ),
)
add(
    "Kandinsky6Transformer3DModel",
    dict(_KANDINSKY, in_audio_dim=5, out_audio_dim=5),
    lambda r: dict(
        hidden_states=r(1, 2, 8, 8, 9),
        encoder_hidden_states=r(1, 6, 18),
        timestep=r.unit(1) * 1000,
        pooled_projections=r(1, 14),
        audio_hidden_states=r(1, 7, 5),
    ),
)
add(
    "Kandinsky6SRTransformer3DModel",
    dict(
        in_visual_dim=4,
        out_visual_dim=6,
        time_dim=22,
        model_dim=24,
        ff_dim=34,
        num_visual_blocks=3,
        axes_dims=(4, 4, 4),
        nabla_window=(3, 3, 3),
    ),
    lambda r: dict(hidden_states=r(1, 1, 8, 8, 9), timestep=r.unit(1) * 1000),
)
add(
    "MiniMaxH3Transformer3DModel",
    dict(
        num_attention_heads=2,
        attention_head_dim=18,
        hidden_size=30,
        num_layers=3,
        num_refiner_layers=2,
        ffn_dim=34,
        in_channels=4,
        audio_in_channels=5,
        text_dim=18,
        freq_dim=32,
        time_embed_hidden_dim=22,
        time_embed_dim=14,
        rope_freq_dim=3,
    ),
    lambda r: dict(
        hidden_states=r(1, 4, 16),
        audio_hidden_states=r(1, 3, 5),
        encoder_hidden_states=r(1, 5, 18),
        timestep=r.unit(2),
        timestep_indices=r.ids(2, 12),
        token_tags=torch.tensor([0] * 5 + [1] * 4 + [2] * 3),
        position_ids=r.ids(9, 12, 3),
        video_indices=torch.arange(5, 9),
        audio_indices=torch.arange(9, 12),
        text_indices=torch.arange(5),
    ),
)
add(
    "TransformerTemporalModel",
    dict(num_attention_heads=3, attention_head_dim=8, in_channels=12, num_layers=3, norm_num_groups=4),
    lambda r: dict(hidden_states=r(4, 12, 4, 4), num_frames=2),
)


def _allegro_rope(r):
    positions = torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(4)).T.reshape(3, 1, 32)
    return tuple((r.unit(4, 4), r.unit(4, 4)) for _ in range(3)), tuple(positions)
