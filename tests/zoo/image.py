"""diffusers transformers for images."""

import torch

from .base import FP32, add

# --- the named families

add(
    "SD3Transformer2DModel",
    dict(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=3,
        joint_attention_dim=20,
        caption_projection_dim=24,
        pooled_projection_dim=22,
        out_channels=4,
        pos_embed_max_size=9,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    ),
    lambda r: dict(
        hidden_states=r(2, 4, 8, 8),
        encoder_hidden_states=r(2, 5, 20),
        pooled_projections=r(2, 22),
        timestep=r.ids(1000, 2),
    ),
)
add(
    "FluxTransformer2DModel",
    dict(
        in_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=18,
        pooled_projection_dim=14,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    ),
    lambda r: dict(
        hidden_states=r(2, 9, 4),
        encoder_hidden_states=r(2, 5, 18),
        pooled_projections=r(2, 14),
        timestep=r.unit(2),
        guidance=r.unit(2),
        img_ids=r.grid(3, 9, 3),
        txt_ids=r.grid(1, 5, 3),
    ),
)
add(
    "QwenImageTransformer2DModel",
    dict(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=18,
        axes_dims_rope=(4, 4, 8),
    ),
    lambda r: dict(
        hidden_states=r(1, 16, 16),
        encoder_hidden_states=r(1, 7, 18),
        encoder_hidden_states_mask=r.ones(1, 7),
        timestep=r.unit(1),
        img_shapes=[(1, 4, 4)],
    ),
)

# --- relatives of SD3 and Flux


def _flux(r, ids=3):
    return dict(
        hidden_states=r(2, 9, 4),
        encoder_hidden_states=r(2, 5, 18),
        timestep=r.unit(2),
        img_ids=r.grid(3, 9, ids),
        txt_ids=r.grid(1, 5, ids),
    )


_FLUX = dict(
    in_channels=4,
    num_layers=2,
    num_single_layers=3,
    attention_head_dim=16,
    num_attention_heads=3,
    joint_attention_dim=18,
    axes_dims_rope=(4, 4, 8),
)

add(
    "AuraFlowTransformer2DModel",
    dict(
        sample_size=8,
        in_channels=4,
        num_mmdit_layers=2,
        num_single_dit_layers=3,
        attention_head_dim=8,
        num_attention_heads=3,
        joint_attention_dim=18,
        caption_projection_dim=24,
        out_channels=4,
        pos_embed_max_size=18,
    ),
    lambda r: dict(hidden_states=r(1, 4, 8, 8), encoder_hidden_states=r(1, 5, 18), timestep=r.unit(1)),
)
add(
    "BriaTransformer2DModel", dict(_FLUX, axes_dims_rope=[0, 4, 12]), lambda r: _flux(r) | dict(timestep=r.ids(1000, 2))
)
add(
    "BriaFiboTransformer2DModel",
    dict(_FLUX, axes_dims_rope=[0, 4, 12], text_encoder_dim=22),
    lambda r: _flux(r) | dict(timestep=r.ids(1000, 2), text_encoder_layers=[r(2, 5, 22) for _ in range(5)]),
)
add(
    "BriaFibo2Transformer2DModel",
    dict(
        in_channels=4,
        dim=48,
        n_layers=4,
        n_refiner_layers=2,
        n_heads=3,
        cap_feat_dim=18,
        injection_layer_ids=(1, 3),
        perceiver_num_layers=2,
        min_num_gist_tokens=4,
        max_num_gist_tokens=8,
        gist_step=2,
        gist_min_text_len=4,
        gist_max_text_len=16,
        axes_dims=(4, 6, 6),
        axes_lens=(32, 16, 16),
    ),
    lambda r: dict(hidden_states=r(1, 4, 8, 8), timestep=r.unit(1), encoder_hidden_states=r(1, 3, 6, 18)),
)
add(
    "ChromaTransformer2DModel",
    dict(_FLUX, approximator_num_channels=8, approximator_hidden_dim=22, approximator_layers=2),
    _flux,
)
add(
    "Flux2Transformer2DModel",
    dict(_FLUX, axes_dims_rope=(4, 4, 4, 4), timestep_guidance_channels=32, mlp_ratio=2.5),
    lambda r: _flux(r, 4) | dict(guidance=r.unit(2)),
)
add(
    "Flux3Transformer2DModel",
    dict(_FLUX, cond_in_channels=6, axes_dims_rope=(4, 4, 4, 4), timestep_channels=32, mlp_ratio=2.0),
    lambda r: _flux(r, 4),
)
add("LongCatImageTransformer2DModel", dict(_FLUX, pooled_projection_dim=18, axes_dims_rope=[4, 4, 8]), _flux)
add("OvisImageTransformer2DModel", dict(_FLUX, out_channels=4), _flux)
add(
    "HunyuanImageTransformer2DModel",
    dict(
        in_channels=4,
        out_channels=4,
        num_attention_heads=3,
        attention_head_dim=8,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.5,
        patch_size=(1, 1),
        text_embed_dim=18,  # a second text width adds 16 MB
        rope_axes_dim=(4, 4),
        guidance_embeds=True,
    ),
    lambda r: dict(
        hidden_states=r(1, 4, 5, 5),
        timestep=r.unit(1) * 1000,
        encoder_hidden_states=r(1, 6, 18),
        encoder_attention_mask=r.full(1, 1, 6),
        guidance=r.full(6.0, 1),
    ),
)
add(
    "HiDreamImageTransformer2DModel",
    dict(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=[18, 14],
        text_emb_dim=22,
        num_routed_experts=3,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(16, 16),
        llama_layers=[0, 1, 2, 3],
        force_inference_output=True,
    ),
    lambda r: dict(
        hidden_states=r(1, 4, 8, 8),
        timesteps=r.ids(1000, 1),
        encoder_hidden_states_t5=r(1, 5, 18),
        encoder_hidden_states_llama3=r(4, 1, 5, 14),
        pooled_embeds=r(1, 22),
    ),
)
add(
    "QwenImageTransformer2DModel",
    dict(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=18,
        axes_dims_rope=(4, 4, 8),
        use_layer3d_rope=True,
        zero_cond_t=True,
        use_additional_t_cond=True,
    ),
    lambda r: dict(
        hidden_states=r(1, 32, 16),
        encoder_hidden_states=r(1, 7, 18),
        encoder_hidden_states_mask=r.ones(1, 7),
        timestep=r.unit(1),
        img_shapes=[[(1, 4, 4), (1, 4, 4)]],
        additional_t_cond=r.ids(2, 1),
    ),
    suffix="layered",
)
add(
    "QwenImage21Transformer2DModel",
    dict(
        in_channels=6,
        out_channels=6,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=3,
        context_in_dim=18,
        axes_dims_rope=(4, 4, 8),
    ),
    lambda r: dict(
        hidden_states=r(1, 16, 6),
        encoder_hidden_states=r(1, 7, 18),
        timestep=r.unit(1),
        img_shapes=[[(1, 4, 4)]],
        img_mask=torch.tensor([[False] * 7 + [True] * 4]),
    ),
)
_NUCLEUS = dict(
    in_channels=16,
    out_channels=4,
    num_layers=5,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=18,
    axes_dims_rope=(4, 4, 8),
    num_experts=3,
    moe_intermediate_dim=22,
    capacity_factors=2.0,
)


def _nucleus(r):
    return dict(
        hidden_states=r(1, 16, 16), img_shapes=[(1, 4, 4)], encoder_hidden_states=r(1, 7, 18), timestep=r.unit(1)
    )


add("NucleusMoEImageTransformer2DModel", dict(_NUCLEUS, mlp_ratio=8.0), _nucleus)
add("NucleusMoEImageTransformer2DModel", _NUCLEUS, _nucleus, suffix="empty")  # widths rounded down to 0: empty matrices

# --- cross-attention DiTs


def _cross(r, channels=4, dim=18):
    return dict(hidden_states=r(2, channels, 8, 8), encoder_hidden_states=r(2, 5, dim), timestep=r.ids(1000, 2))


add(
    "DiTTransformer2DModel",
    dict(
        num_attention_heads=3,
        attention_head_dim=8,
        in_channels=4,
        num_layers=3,
        sample_size=8,
        num_embeds_ada_norm=13,
        norm_num_groups=4,
    ),
    lambda r: dict(hidden_states=r(2, 4, 8, 8), timestep=r.ids(13, 2), class_labels=r.ids(13, 2)),
)
_PIXART = dict(
    num_attention_heads=3,
    attention_head_dim=8,
    in_channels=4,
    num_layers=3,
    cross_attention_dim=24,
    caption_channels=18,
    sample_size=8,
)
add(
    "PixArtTransformer2DModel",
    dict(_PIXART, out_channels=8, use_additional_conditions=True),
    lambda r: dict(_cross(r), added_cond_kwargs=dict(resolution=r.grid(64, 2, 2), aspect_ratio=r.unit(2, 1))),
)
_SANA = dict(
    in_channels=4,
    out_channels=4,
    num_attention_heads=3,
    attention_head_dim=8,
    num_layers=3,
    num_cross_attention_heads=2,
    cross_attention_head_dim=12,
    cross_attention_dim=24,
    caption_channels=18,
    sample_size=8,
)
add("SanaTransformer2DModel", _SANA, _cross)
add(
    "SanaTransformer2DModel",
    dict(_SANA, guidance_embeds=True, qk_norm="rms_norm_across_heads", interpolation_scale=1.0),
    lambda r: dict(_cross(r), guidance=r.unit(2)),
    suffix="sprint",
)
add(
    "CogView3PlusTransformer2DModel",
    dict(
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=3,
        text_embed_dim=18,
        time_embed_dim=22,
        condition_dim=6,
        pos_embed_max_size=8,
        sample_size=8,
    ),
    lambda r: dict(_cross(r), original_size=r.full(8, 2, 2), target_size=r.full(8, 2, 2), crop_coords=r.full(0, 2, 2)),
)
add(
    "CogView4Transformer2DModel",
    dict(
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=3,
        text_embed_dim=18,
        time_embed_dim=22,
        condition_dim=6,
        sample_size=8,
        rope_axes_dim=(8, 8),
    ),
    lambda r: dict(_cross(r), original_size=r.full(8, 2, 2), target_size=r.full(8, 2, 2), crop_coords=r.full(0, 2, 2)),
)
add(
    "GlmImageTransformer2DModel",
    dict(
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=3,
        text_embed_dim=18,
        time_embed_dim=22,
        condition_dim=6,
        prior_vq_quantizer_codebook_size=31,
    ),
    lambda r: dict(
        _cross(r),
        prior_token_id=r.ids(31, 2, 16),
        prior_token_drop=r.ones(2, dtype=torch.bool),
        target_size=r.full(8, 2, 2),
        crop_coords=r.full(0, 2, 2),
    ),
)
_HUNYUAN_DIT = dict(
    num_attention_heads=3,
    attention_head_dim=8,
    in_channels=4,
    patch_size=2,
    sample_size=8,
    hidden_size=24,
    cross_attention_dim=18,
    cross_attention_dim_t5=16,
    pooled_projection_dim=10,
    text_len=5,
    text_len_t5=6,
)


def _hunyuan_dit(r):
    return dict(
        _cross(r) | dict(timestep=r.unit(2) * 1000),
        text_embedding_mask=r.full(1, 2, 5),
        encoder_hidden_states_t5=r(2, 6, 16),
        text_embedding_mask_t5=r.full(1, 2, 6),
        image_meta_size=r.grid(64, 2, 6),
        style=r.ids(1, 2),
        image_rotary_emb=(r.unit(16, 8), r.unit(16, 8)),
    )


add("HunyuanDiT2DModel", dict(_HUNYUAN_DIT, num_layers=4), _hunyuan_dit)
add(
    "HunyuanDiT2DControlNetModel",
    dict(_HUNYUAN_DIT, transformer_num_layers=4),
    lambda r: dict(_hunyuan_dit(r), controlnet_cond=r(2, 4, 8, 8)),
)
add(
    "Transformer2DModel",
    dict(
        num_attention_heads=3,
        attention_head_dim=8,
        in_channels=12,
        num_layers=3,
        norm_num_groups=4,
        cross_attention_dim=18,
    ),
    lambda r: dict(hidden_states=r(2, 12, 6, 6), encoder_hidden_states=r(2, 5, 18)),
)
add(
    "Transformer2DModel",
    dict(
        num_attention_heads=3,
        attention_head_dim=8,
        num_layers=3,
        cross_attention_dim=18,
        sample_size=5,
        num_vector_embeds=11,
        num_embeds_ada_norm=13,
    ),
    lambda r: dict(hidden_states=r.ids(11, 2, 25), encoder_hidden_states=r(2, 5, 18), timestep=r.ids(13, 1)[0]),
    suffix="vq",
)
add(
    "DreamLiteTransformer2DModel",
    dict(
        num_attention_heads=3,
        attention_head_dim=8,
        in_channels=12,
        num_layers=3,
        norm_num_groups=4,
        cross_attention_dim=18,
        qk_norm="rms_norm",
    ),
    lambda r: dict(hidden_states=r(2, 12, 6, 6), encoder_hidden_states=r(2, 5, 18)),
)
add(
    "PriorTransformer",
    dict(
        num_attention_heads=3,
        attention_head_dim=8,
        num_layers=3,
        embedding_dim=14,
        num_embeddings=7,
        additional_embeddings=4,
    ),
    lambda r: dict(
        hidden_states=r(2, 14), timestep=r.ids(1000, 2), proj_embedding=r(2, 14), encoder_hidden_states=r(2, 7, 14)
    ),
)
add(
    "UVit2DModel",
    dict(
        hidden_size=24,
        cond_embed_dim=18,
        micro_cond_encode_dim=6,
        micro_cond_embed_dim=30,
        encoder_hidden_size=22,
        vocab_size=37,
        codebook_size=36,
        in_channels=24,
        block_out_channels=24,
        num_res_blocks=2,
        downsample=True,
        upsample=True,
        block_num_heads=3,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=34,
        sample_size=4,
    ),
    lambda r: dict(
        input_ids=r.ids(37, 2, 4, 4),
        encoder_hidden_states=r(2, 5, 22),
        pooled_text_emb=r(2, 18),
        micro_conds=r.grid(64, 2, 5),
    ),
)
add(
    "UniDiffuserModel",
    dict(
        text_dim=18,
        clip_img_dim=14,
        num_text_tokens=5,
        num_attention_heads=3,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        sample_size=8,
        patch_size=2,
        activation_fn="gelu",
        num_embeds_ada_norm=13,
        norm_type="layer_norm",
        use_patch_pos_embed=True,
        block_type="unidiffuser",
        use_data_type_embedding=True,
        ff_final_dropout=True,
    ),
    lambda r: dict(
        latent_image_embeds=r(2, 4, 8, 8),
        image_embeds=r(2, 1, 14),
        prompt_embeds=r(2, 5, 18),
        timestep_img=r.ids(1000, 2),
        timestep_text=r.ids(1000, 2),
    ),
    dtypes=FP32,
)  # its time embedding does not cast

# --- single-stream and language-model-like ones


def _lumina_rope():
    angles = torch.arange(384.0)[:, None, None] + 0.1 * torch.arange(4.0)
    return torch.polar(torch.ones(384, 384, 4), angles.expand(384, 384, 4).contiguous())


def _ideogram_indicator(r):
    return torch.tensor([[3] * 5 + [2] * 7])  # 3: a token of the language model, 2: one of the output image


add(
    "ErnieImageTransformer2DModel",
    dict(
        hidden_size=48,
        num_attention_heads=3,
        num_layers=3,
        ffn_hidden_size=34,
        in_channels=4,
        out_channels=4,
        text_in_dim=18,
        rope_axes_dim=(4, 6, 6),
    ),
    lambda r: dict(hidden_states=r(2, 4, 4, 4), timestep=r.unit(2), text_bth=r(2, 5, 18), text_lens=r.ones(2) * 5),
)
add(
    "Ideogram4Transformer2DModel",
    dict(
        in_channels=6,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=3,
        intermediate_size=34,
        adaln_dim=14,
        llm_features_dim=18,
        mrope_section=(4, 2, 2),
    ),
    lambda r: dict(
        hidden_states=r(1, 12, 6),
        timestep=r.unit(1),
        encoder_hidden_states=r(1, 12, 18),
        position_ids=r.ids(9, 1, 12, 3),
        segment_ids=r.ones(1, 12),
        indicator=_ideogram_indicator(r),
    ),
)
add(
    "JoyImageEditTransformer3DModel",
    dict(
        in_channels=4,
        hidden_size=48,
        num_attention_heads=3,
        text_dim=18,
        mlp_width_ratio=2.0,
        num_layers=3,
        rope_dim_list=[4, 6, 6],
    ),
    lambda r: dict(hidden_states=r(1, 4, 1, 8, 8), timestep=r.ids(1000, 1), encoder_hidden_states=r(1, 5, 18)),
)
add(
    "JoyImageEditPlusTransformer3DModel",
    dict(
        in_channels=4,
        hidden_size=48,
        num_attention_heads=3,
        text_dim=18,
        mlp_width_ratio=2.0,
        num_layers=3,
        rope_dim_list=[4, 6, 6],
    ),
    lambda r: dict(
        hidden_states=r(1, 8, 4, 1, 2, 2),
        timestep=r.ids(1000, 1),
        encoder_hidden_states=r(1, 5, 18),
        encoder_hidden_states_mask=r.full(1, 1, 5),
        shape_list=[[(1, 2, 2), (1, 2, 2)]],
    ),
)
add(
    "Krea2Transformer2DModel",
    dict(
        in_channels=6,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=34,
        timestep_embed_dim=32,
        text_hidden_dim=24,
        num_text_layers=3,
        text_num_attention_heads=3,
        text_num_key_value_heads=3,
        text_intermediate_size=26,
        num_layerwise_text_blocks=2,
        num_refiner_text_blocks=2,
        axes_dims_rope=(4, 6, 6),
    ),
    lambda r: dict(
        hidden_states=r(2, 9, 6),
        encoder_hidden_states=r(2, 5, 3, 24),
        timestep=r.unit(2),
        position_ids=r.grid(5, 14, 3),
    ),
)
add(
    "Lumina2Transformer2DModel",
    dict(
        sample_size=8,
        in_channels=4,
        hidden_size=24,
        num_layers=3,
        num_refiner_layers=2,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=10,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(32, 16, 16),
        cap_feat_dim=18,
    ),
    lambda r: dict(_cross(r), encoder_attention_mask=r.ones(2, 5, dtype=torch.bool)),
)
add(
    "LuminaNextDiT2DModel",
    dict(
        sample_size=8,
        in_channels=4,
        hidden_size=24,
        num_layers=3,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=10,
        cross_attention_dim=18,
    ),
    lambda r: dict(
        _cross(r),
        encoder_mask=r.ones(2, 5, dtype=torch.bool),
        image_rotary_emb=_lumina_rope(),
        cross_attention_kwargs={},
    ),
)
add(
    "OmniGenTransformer2DModel",
    dict(
        in_channels=4,
        hidden_size=24,
        num_attention_heads=3,
        num_key_value_heads=3,
        intermediate_size=34,
        num_layers=3,
        pad_token_id=0,
        vocab_size=53,
        time_step_dim=26,
        pos_embed_max_size=9,
        rope_scaling={"long_factor": [1] * 4, "short_factor": [1] * 4},
    ),
    lambda r: dict(
        hidden_states=r(1, 4, 8, 8),
        timestep=r.unit(1),
        input_ids=r.ids(53, 1, 5),
        input_img_latents=[],
        input_image_sizes={},
        attention_mask=r.ones(1, 22, 22),
        position_ids=torch.arange(22)[None],
    ),
)
add(
    "PRXTransformer2DModel",
    dict(in_channels=4, context_in_dim=18, hidden_size=48, mlp_ratio=2.5, num_heads=3, depth=3, axes_dim=[8, 8]),
    _cross,
)
add(
    "ZImageTransformer2DModel",
    dict(
        in_channels=4,
        dim=48,
        n_layers=3,
        n_refiner_layers=2,
        n_heads=3,
        n_kv_heads=3,
        cap_feat_dim=18,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 32, 32],
    ),
    lambda r: dict(x=[r(4, 1, 8, 8), r(4, 1, 8, 8)], t=r.unit(2), cap_feats=[r(5, 18), r(7, 18)]),
)
add(
    "ZImageControlNetModel",
    dict(
        control_layers_places=[0, 2],
        control_refiner_layers_places=[0, 1],
        control_in_dim=4,
        dim=48,
        n_refiner_layers=2,
        n_heads=3,
        n_kv_heads=3,
    ),
    None,
)  # reads layers of the transformer it was built from (`from_transformer`): no forward of its own
