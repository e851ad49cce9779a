"""diffusers UNets, controlnets and adapters."""

from .base import add, exclude

# --- the named families

_SDXL = dict(
    in_channels=4,
    block_out_channels=(12, 24),
    layers_per_block=2,
    norm_num_groups=4,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    cross_attention_dim=22,
    transformer_layers_per_block=(1, 2),
    attention_head_dim=(2, 3),
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=8,
    projection_class_embeddings_input_dim=6 * 8 + 14,
)


def _unet(r, channels=4, dim=22):
    return dict(sample=r(2, channels, 8, 8), timestep=r.ids(1000, 2), encoder_hidden_states=r(2, 5, dim))


def _sdxl(r):
    return dict(_unet(r), added_cond_kwargs=dict(text_embeds=r(2, 14), time_ids=r.grid(64, 2, 6)))


add(
    "UNet2DConditionModel",
    dict(_SDXL, sample_size=8, out_channels=4, up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")),
    _sdxl,
)
add(
    "ControlNetModel",
    dict(_SDXL, conditioning_embedding_out_channels=(6, 10)),
    lambda r: dict(_sdxl(r), controlnet_cond=r(2, 3, 16, 16)),
)

# --- UNets

_CROSS_DOWN = ("CrossAttnDownBlock2D", "DownBlock2D")
_CROSS_UP = ("UpBlock2D", "CrossAttnUpBlock2D")

add(
    "UNet2DConditionModel",
    dict(
        sample_size=8,
        block_out_channels=(12, 20),
        layers_per_block=2,
        norm_num_groups=4,
        cross_attention_dim=22,
        down_block_types=_CROSS_DOWN,
        up_block_types=_CROSS_UP,
        attention_head_dim=4,
    ),
    _unet,
    suffix="sd15",
)
add(
    "UNet2DConditionModel",
    dict(
        sample_size=8,
        block_out_channels=(12, 20),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=22,
        down_block_types=("SimpleCrossAttnDownBlock2D", "ResnetDownsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("ResnetUpsampleBlock2D", "SimpleCrossAttnUpBlock2D"),
        attention_head_dim=4,
        encoder_hid_dim=14,
        encoder_hid_dim_type="text_proj",
        addition_embed_type="text",
        addition_embed_type_num_heads=2,
        class_embed_type="timestep",
        resnet_time_scale_shift="scale_shift",
    ),
    lambda r: dict(_unet(r, dim=14), class_labels=r.ids(1000, 2)),
    suffix="if",
)
add(
    "UNet2DModel",
    dict(
        sample_size=8,
        block_out_channels=(12, 20),
        layers_per_block=2,
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    lambda r: dict(sample=r(2, 3, 8, 8), timestep=r.ids(1000, 2)),
)
add(
    "UNet1DModel",
    dict(
        sample_size=16,
        in_channels=6,
        out_channels=6,
        extra_in_channels=16,
        block_out_channels=(8, 8, 32),
        up_block_types=("UpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"),
    ),
    lambda r: dict(sample=r(2, 6, 32), timestep=r.ids(1000, 2)),
)
_UNET_3D = dict(
    sample_size=8,
    block_out_channels=(8, 16),
    layers_per_block=1,
    norm_num_groups=4,
    cross_attention_dim=22,
    attention_head_dim=4,
)


def _unet_3d(r):
    return dict(sample=r(1, 4, 3, 8, 8), timestep=r.ids(1000, 1), encoder_hidden_states=r(1, 5, 22))


add(
    "UNet3DConditionModel",
    dict(
        _UNET_3D,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    ),
    _unet_3d,
)
add(
    "I2VGenXLUNet",
    dict(
        _UNET_3D,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        num_attention_heads=2,
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    ),
    lambda r: dict(_unet_3d(r), fps=r.ids(30, 1), image_latents=r(1, 4, 3, 8, 8), image_embeddings=r(1, 22)),
)
_MOTION = dict(
    block_out_channels=(8, 16),
    layers_per_block=2,
    norm_num_groups=4,
    cross_attention_dim=22,
    down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
    motion_num_attention_heads=2,
)
add(
    "UNetMotionModel",
    dict(
        _MOTION,
        sample_size=8,
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
        num_attention_heads=2,
        motion_max_seq_length=8,
    ),
    lambda r: _unet_3d(r) | dict(encoder_hidden_states=r(3, 5, 22)),
)  # one row a frame
add(
    "MotionAdapter",
    dict(
        block_out_channels=(8, 16),
        motion_layers_per_block=2,
        motion_num_attention_heads=2,
        motion_norm_num_groups=4,
        motion_max_seq_length=8,
    ),
    None,
)  # the motion modules of another UNet: no forward of its own
add(
    "UNetSpatioTemporalConditionModel",
    dict(
        sample_size=8,
        in_channels=8,
        block_out_channels=(32, 32),
        layers_per_block=1,
        cross_attention_dim=22,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        num_attention_heads=(2, 4),
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
        num_frames=2,
    ),
    lambda r: dict(
        sample=r(1, 2, 8, 8, 8),
        timestep=r.ids(1000, 1),
        encoder_hidden_states=r(1, 1, 22),
        added_time_ids=r.grid(9, 1, 3),
    ),
)
add(
    "AudioLDM2UNet2DConditionModel",
    dict(
        sample_size=8,
        block_out_channels=(12, 20),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=((None, 22, 14), (None, 22, 14)),
        down_block_types=_CROSS_DOWN,
        up_block_types=_CROSS_UP,
        attention_head_dim=4,
    ),
    lambda r: dict(_unet(r), encoder_hidden_states_1=r(2, 6, 14)),
)
add(
    "DreamLiteUNetModel",
    dict(
        sample_size=8,
        block_out_channels=(8, 16, 24),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=22,
        attention_head_dim=4,
        ff_mult=2,
        num_kv_heads=1,
    ),
    lambda r: _unet(r),
)
add(
    "Kandinsky3UNet",
    dict(
        time_embedding_dim=20,
        groups=2,
        attention_head_dim=4,
        layers_per_block=2,
        block_out_channels=(8, 12, 16, 20),
        cross_attention_dim=12,
        encoder_hid_dim=14,
    ),
    lambda r: dict(_unet(r, dim=14), encoder_attention_mask=r.ones(2, 5)),
)
_CASCADE = dict(
    in_channels=4,
    out_channels=4,
    timestep_ratio_embedding_dim=8,
    conditioning_dim=18,
    block_out_channels=(18, 24),
    num_attention_heads=(3, 4),
    down_num_layers_per_block=(2, 2),
    up_num_layers_per_block=(2, 2),
    down_blocks_repeat_mappers=(1, 1),
    up_blocks_repeat_mappers=(1, 1),
    clip_text_pooled_in_channels=14,
    clip_seq=2,
)
add(
    "StableCascadeUNet",
    dict(_CASCADE, clip_text_in_channels=14, clip_image_in_channels=10),
    lambda r: dict(
        sample=r(1, 4, 8, 8),
        timestep_ratio=r.unit(1),
        clip_text_pooled=r(1, 1, 14),
        clip_text=r(1, 5, 14),
        clip_img=r(1, 1, 10),
    ),
)
add(
    "StableCascadeUNet",
    dict(_CASCADE, patch_size=2, effnet_in_channels=6, pixel_mapper_in_channels=3, switch_level=(False,)),
    lambda r: dict(sample=r(1, 4, 8, 8), timestep_ratio=r.unit(1), clip_text_pooled=r(1, 1, 14), effnet=r(1, 6, 4, 4)),
    suffix="decoder",
)

# --- controlnets and adapters

_CONTROL = dict(
    block_out_channels=(12, 20),
    layers_per_block=2,
    norm_num_groups=4,
    cross_attention_dim=22,
    conditioning_embedding_out_channels=(6, 10),
    attention_head_dim=4,
)
add(
    "ControlNetUnionModel",
    dict(
        _SDXL,
        conditioning_embedding_out_channels=(6, 10),
        num_control_type=3,
        num_trans_channel=12,
        num_trans_head=2,
        num_proj_channel=12,
    ),
    lambda r: dict(_sdxl(r), controlnet_cond=[r(2, 3, 16, 16)], control_type=r.grid(2, 2, 3), control_type_idx=[1]),
)
add(
    "SparseControlNetModel",
    dict(
        _CONTROL,
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        motion_num_attention_heads=2,
        motion_max_seq_length=8,
    ),
    lambda r: dict(
        sample=r(1, 4, 3, 8, 8),
        timestep=r.ids(1000, 1),
        encoder_hidden_states=r(3, 5, 22),
        controlnet_cond=r(1, 4, 3, 8, 8),
        conditioning_mask=r.full(1, 1, 1, 3, 8, 8),
    ),
)
add(
    "ControlNetXSAdapter",
    dict(
        conditioning_embedding_out_channels=(6, 10),
        num_attention_heads=2,
        block_out_channels=(4, 8),
        base_block_out_channels=(8, 16),
        cross_attention_dim=22,
        down_block_types=_CROSS_DOWN,
        sample_size=8,
        max_norm_num_groups=4,
    ),
    None,
)  # one half of a UNetControlNetXSModel: its forward raises
add(
    "UNetControlNetXSModel",
    dict(
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(8, 16),
        norm_num_groups=4,
        cross_attention_dim=22,
        num_attention_heads=2,
        ctrl_conditioning_embedding_out_channels=(6, 10),
        ctrl_block_out_channels=(4, 8),
        ctrl_num_attention_heads=2,
        ctrl_max_norm_num_groups=4,
        ctrl_learn_time_embedding=True,
        time_embedding_mix=0.5,
    ),
    lambda r: dict(_unet(r), controlnet_cond=r(2, 3, 16, 16), conditioning_scale=0.9),
)
_SD3 = dict(
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
)
add(
    "SD3ControlNetModel",
    _SD3,
    lambda r: dict(
        hidden_states=r(2, 4, 8, 8),
        controlnet_cond=r(2, 4, 8, 8),
        encoder_hidden_states=r(2, 5, 20),
        pooled_projections=r(2, 22),
        timestep=r.ids(1000, 2),
    ),
)
add(
    "FluxControlNetModel",
    dict(
        in_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=18,
        pooled_projection_dim=14,
        axes_dims_rope=[4, 4, 8],
        num_mode=3,
    ),
    lambda r: dict(
        hidden_states=r(2, 9, 4),
        controlnet_cond=r(2, 9, 4),
        controlnet_mode=r.ids(3, 2, 1),
        encoder_hidden_states=r(2, 5, 18),
        pooled_projections=r(2, 14),
        timestep=r.unit(2),
        img_ids=r.grid(3, 9, 3),
        txt_ids=r.grid(1, 5, 3),
    ),
)
add(
    "QwenImageControlNetModel",
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
        controlnet_cond=r(1, 16, 16),
        encoder_hidden_states=r(1, 7, 18),
        encoder_hidden_states_mask=r.ones(1, 7),
        timestep=r.unit(1),
        img_shapes=[(1, 4, 4)],
    ),
)
add(
    "SanaControlNetModel",
    dict(
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
    ),
    lambda r: dict(
        hidden_states=r(2, 4, 8, 8),
        encoder_hidden_states=r(2, 5, 18),
        timestep=r.ids(1000, 2),
        controlnet_cond=r(2, 4, 8, 8),
    ),
)
_ADAPTER = dict(in_channels=3, channels=[6, 10, 14, 14], num_res_blocks=2, downscale_factor=8)
add("T2IAdapter", _ADAPTER, lambda r: dict(x=r(2, 3, 32, 32)))
add("T2IAdapter", dict(_ADAPTER, adapter_type="full_adapter_xl"), lambda r: dict(x=r(2, 3, 32, 32)), suffix="xl")
add("T2IAdapter", dict(_ADAPTER, adapter_type="light_adapter"), lambda r: dict(x=r(2, 3, 32, 32)), suffix="light")

for _name in (
    "MultiControlNetModel",
    "FluxMultiControlNetModel",
    "HunyuanDiT2DMultiControlNetModel",
    "QwenImageMultiControlNetModel",
    "SD3MultiControlNetModel",
):
    exclude(_name, "holds a list of controlnets that the caller loads one by one: no config, not a component")
exclude("MultiAdapter", "holds a list of T2IAdapters, saved as one folder each: no config, not a component")
