"""diffusers autoencoders."""

from .base import FP32, add

add(
    "AutoencoderKL",
    dict(
        block_out_channels=(6, 10, 14),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=2,
        latent_channels=3,
        norm_num_groups=2,
        sample_size=16,
    ),
    lambda r: dict(sample=r(1, 3, 16, 16)),
)


def _image(r):
    return dict(sample=r(1, 3, 16, 16))


def _video(r):
    return dict(sample=r(1, 3, 9, 16, 16))


# --- images

_KL = dict(
    block_out_channels=(6, 10),
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    layers_per_block=2,
    latent_channels=3,
    norm_num_groups=2,
    sample_size=16,
)
add("AutoencoderKLFlux2", _KL, _image)
add(
    "AsymmetricAutoencoderKL",
    dict(
        down_block_types=("DownEncoderBlock2D",) * 2,
        down_block_out_channels=(6, 10),
        layers_per_down_block=1,
        up_block_types=("UpDecoderBlock2D",) * 2,
        up_block_out_channels=(6, 10),
        layers_per_up_block=2,
        latent_channels=3,
        norm_num_groups=2,
        sample_size=16,
    ),
    lambda r: dict(sample=r(1, 3, 16, 16), mask=r.full(1, 1, 1, 16, 16)),
)
add(
    "AutoencoderKLTemporalDecoder",
    dict(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=1, latent_channels=3
    ),
    lambda r: dict(sample=r(2, 3, 16, 16), num_frames=2),
)
add("VQModel", dict(_KL, num_vq_embeddings=13), _image)
add(
    "AutoencoderTiny",
    dict(
        encoder_block_out_channels=(6, 6),
        decoder_block_out_channels=(6, 6),
        num_encoder_blocks=(1, 2),
        num_decoder_blocks=(2, 1),
    ),
    _image,
    dtypes=FP32,
)  # its forward passes through bytes / 255
add(
    "AutoencoderDC",
    dict(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(2, 2),
        decoder_layers_per_block=(2, 2),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        decoder_norm_types=["rms_norm", "rms_norm"],
        decoder_act_fns="silu",
    ),
    _image,
)
add(
    "AutoencoderKLKVAE",
    dict(channels=32, num_enc_blocks=1, num_dec_blocks=1, z_channels=4, ch_mult=(1, 2), sample_size=16),
    _image,
)
add(
    "AutoencoderKLHunyuanImage",
    dict(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        spatial_compression_ratio=2,
        sample_size=16,
    ),
    _image,
)
add(
    "ConsistencyDecoderVAE",
    dict(
        encoder_block_out_channels=(6, 10),
        encoder_down_block_types=("DownEncoderBlock2D",) * 2,
        encoder_layers_per_block=1,
        encoder_norm_num_groups=2,
        latent_channels=4,
        sample_size=16,
        decoder_block_out_channels=(6, 10),
        decoder_down_block_types=("ResnetDownsampleBlock2D",) * 2,
        decoder_up_block_types=("ResnetUpsampleBlock2D",) * 2,
        decoder_layers_per_block=1,
        decoder_norm_num_groups=2,
    ),
    _image,
)
add(
    "AutoencoderRAE",
    dict(
        encoder_type="dinov2",
        encoder_hidden_size=64,
        encoder_patch_size=37,
        encoder_num_hidden_layers=3,
        decoder_hidden_size=24,
        decoder_num_hidden_layers=3,
        decoder_num_attention_heads=3,
        decoder_intermediate_size=22,
        patch_size=4,
        encoder_input_size=74,
    ),
    _image,
)

# --- video

add(
    "AutoencoderKLAllegro",
    dict(
        down_block_types=("AllegroDownBlock3D",) * 2,
        up_block_types=("AllegroUpBlock3D",) * 2,
        block_out_channels=(8, 12),
        temporal_downsample_blocks=(True, False),
        temporal_upsample_blocks=(False, True),
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=2,
        latent_channels=4,
    ),
    None,
)  # encodes and decodes in tiles only, which the caller has to switch on
add(
    "AutoencoderKLCogVideoX",
    dict(
        down_block_types=("CogVideoXDownBlock3D",) * 3,
        up_block_types=("CogVideoXUpBlock3D",) * 3,
        block_out_channels=(8, 8, 12),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    ),
    _video,
)
add(
    "AutoencoderKLCosmos",
    dict(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 12),
        decode_block_out_channels=(8, 8, 12),
        attention_resolutions=(8,),
        resolution=16,
        num_layers=1,
        patch_size=2,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    ),
    _video,
    dtypes=FP32,
)  # 3-D average pooling
add(
    "AutoencoderKLHunyuanVideo",
    dict(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 12),
        layers_per_block=1,
        norm_num_groups=2,
    ),
    _video,
)
_HY = dict(
    latent_channels=4,
    block_out_channels=(16, 16, 16),
    layers_per_block=1,
    spatial_compression_ratio=4,
    temporal_compression_ratio=2,
)
add("AutoencoderKLHunyuanVideo15", _HY, _video)
add("AutoencoderKLHunyuanImageRefiner", _HY, _video)
add(
    "AutoencoderKLKVAEVideo",
    dict(ch=32, ch_mult=(1, 1), num_res_blocks=1, z_channels=4, temporal_compress_times=2),
    _video,
)
_LTX = dict(
    latent_channels=6,
    block_out_channels=(6, 10, 10),
    down_block_types=("LTXVideoDownBlock3D",) * 3,
    decoder_block_out_channels=(6, 10, 10),
    layers_per_block=(1, 2, 1, 1),
    decoder_layers_per_block=(1, 2, 1, 1),
    spatio_temporal_scaling=(True, True, False),
    decoder_spatio_temporal_scaling=(True, True, False),
    decoder_inject_noise=(False, False, False, False),
    downsample_type=("conv",) * 3,
    upsample_residual=(False,) * 3,
    upsample_factor=(1, 1, 1),
    patch_size=2,
)
add("AutoencoderKLLTXVideo", _LTX, _video)
add(
    "AutoencoderKLLTXVideo",
    dict(
        _LTX,
        timestep_conditioning=True,
        decoder_inject_noise=(True, False, True, False),
        down_block_types=("LTXVideo095DownBlock3D",) * 3,
        upsample_residual=(True,) * 3,
        upsample_factor=(2, 2, 2),
        downsample_type=("spatial", "temporal", "spatiotemporal"),
        spatio_temporal_scaling=(True,) * 3,
        decoder_spatio_temporal_scaling=(True,) * 3,
        block_out_channels=(8, 16, 16),
        decoder_block_out_channels=(8, 16, 32),
    ),
    lambda r: dict(sample=r(1, 3, 9, 16, 16), temb=r.unit(1)),
    suffix="timestep",
)  # has a 0-d parameter
add(
    "AutoencoderKLLTX2Video",
    dict(
        latent_channels=6,
        block_out_channels=(8, 16, 16),
        down_block_types=("LTX2VideoDownBlock3D",) * 3,
        decoder_block_out_channels=(8, 16),
        layers_per_block=(1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True,) * 3,
        decoder_spatio_temporal_scaling=(True,) * 2,
        decoder_inject_noise=(False,) * 3,
        downsample_type=("spatial", "temporal", "spatiotemporal"),
        upsample_type=("spatiotemporal",) * 2,
        upsample_residual=(True,) * 2,
        upsample_factor=(2, 2),
        patch_size=2,
    ),
    _video,
)
add(
    "LTX2VideoDiffusionDecoderModel",
    dict(
        latent_channels=6,
        patch_size=2,
        decoder_head_dim=8,
        decoder_stage_channels=(16, 16, 16, 16, 8),
        decoder_stage_depths=(2, 2, 2, 2, 3),
        decoder_stage_kernels=((1, 3, 3),) * 4,
        decoder_upsample_strides=((1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 2, 2)),  # attention is a slow loop on CPU
        decoder_upsample_channel_reductions=(1, 1, 1, 2),
        decoder_stage5_kernel=(1, 3, 3),
        decoder_t_emb_dim=12,
        spatial_compression_ratio=4,
        temporal_compression_ratio=1,
    ),
    lambda r: dict(z=r(1, 6, 1, 3, 3)),
)
add(
    "AutoencoderKLMagvit",
    dict(
        latent_channels=4,
        block_out_channels=[8, 12],
        down_block_types=["SpatialDownBlock3D", "SpatialTemporalDownBlock3D"],
        up_block_types=["SpatialUpBlock3D", "SpatialTemporalUpBlock3D"],
        layers_per_block=1,
        norm_num_groups=2,
    ),
    _video,
)
add(
    "AutoencoderKLMiniMaxH3",
    dict(
        latent_channels=4,
        block_out_channels=(8, 12),
        layers_per_block=1,
        spatial_downsample_factors=(2, 1),
        temporal_downsample_factors=(2, 2),
        norm_num_groups=2,
        decoder_num_layers=3,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        decoder_ffn_mult=2,
        clip_length=17,
        token_drop=3,
        latents_mean=(0.0,) * 4,
        latents_std=(1.0,) * 4,
    ),
    lambda r: dict(sample=r(1, 3, 34, 16, 16)),
)
add(
    "AutoencoderKLMochi",
    dict(
        latent_channels=4,
        encoder_block_out_channels=(32,) * 4,
        decoder_block_out_channels=(32,) * 4,
        layers_per_block=(1, 1, 1, 1, 1),
        latents_mean=(0.0,) * 4,
        latents_std=(1.0,) * 4,
    ),
    _video,
)
_WAN_VAE = dict(
    base_dim=6,
    z_dim=4,
    dim_mult=[1, 1, 1, 1],
    num_res_blocks=1,
    temperal_downsample=[False, True, True],
    latents_mean=[0.0] * 4,
    latents_std=[1.0] * 4,
)
add("AutoencoderKLWan", _WAN_VAE, _video)
add(
    "AutoencoderKLWan",
    dict(
        _WAN_VAE,
        decoder_base_dim=8,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    ),
    _video,
    suffix="2.2",
)
add("AutoencoderKLQwenImage", _WAN_VAE, _video)
add(
    "AutoencoderKLQwenImage21",
    dict(_WAN_VAE, decoder_base_dim=8, in_channels=3, out_channels=3),
    lambda r: dict(sample=r(1, 3, 1, 16, 16)),
)
add(
    "AutoencoderVidTok",
    dict(
        ch=32,
        ch_mult=[1, 1, 1],
        z_channels=4,
        num_res_blocks=1,
        spatial_ds=[1],
        spatial_us=[1],
        tempo_ds=[1],
        tempo_us=[1],
    ),
    lambda r: dict(sample=r(1, 3, 8, 16, 16)),
)
add(
    "Kandinsky6SRVAE",
    dict(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 16),
        decoder_block_out_channels=(8, 8, 16),
        layers_per_block=1,
        temporal_compression_ratio=2,
    ),
    _video,
)
add(
    "Kandinsky6SRLatentUpscalerBank",
    dict(
        in_channels=4,
        stage_channels=(16, 8, 8),
        num_pre_blocks=2,
        num_mid_blocks=2,
        num_post_blocks=2,
        num_x2_adapter_blocks=2,
    ),
    lambda r: dict(latents=r(1, 4, 2, 4, 4), scale=2),
)

# --- audio

add(
    "AutoencoderOobleck",
    dict(
        encoder_hidden_size=6,
        downsampling_ratios=[2, 4],
        channel_multiples=[1, 2],
        decoder_channels=6,
        decoder_input_channels=3,
    ),
    lambda r: dict(sample=r(1, 2, 64)),
)
add(
    "AutoencoderSAME",
    dict(
        patch_size=4,
        encoder_channels=16,
        encoder_c_mults=(2,),
        encoder_strides=(4,),
        encoder_transformer_depths=(3,),
        latent_dim=6,
        dim_heads=8,
        ff_mult=2,
    ),
    lambda r: dict(sample=r(1, 2, 128)),
)
add(
    "AutoencoderKLKVAEAudio",
    dict(
        encoder_dim=4,
        encoder_rates=[2, 2],
        latent_dim=16,
        codebook_dim=6,
        decoder_dim=16,
        decoder_rates=[2, 2],
        attn_num_heads=2,
    ),
    lambda r: dict(sample=r(1, 1, 64)),
)
add(
    "AutoencoderKLLTX2Audio",
    dict(base_channels=8, ch_mult=(1, 2), num_res_blocks=1, resolution=16, latent_channels=4, mel_bins=16),
    lambda r: dict(sample=r(1, 2, 8, 16)),
)
add(
    "AutoencoderKLMiniMaxH3Audio",
    dict(
        encoder_dim=4,
        encoder_rates=(2, 2),
        latent_dim=16,
        latent_channels=8,
        num_attention_heads=2,
        decoder_dim=16,
        decoder_rates=(2, 2),
        decoder_kernel_sizes=(4, 4),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3),),
    ),
    lambda r: dict(sample=r(1, 1, 64)),
)
add(
    "Cosmos3AVAEAudioTokenizer",
    dict(
        vocoder_input_dim=6,
        dec_dim=8,
        dec_c_mults=(1, 2),
        dec_strides=(2, 4),
        enc_dim=8,
        enc_intermediate_dim=16,
        enc_num_layers=2,
        enc_num_blocks=1,
        enc_n_fft=8,
        enc_hop_length=2,
        enc_latent_dim=12,
        enc_c_mults=(1, 2),
        enc_strides=(2, 2),
    ),
    lambda r: dict(sample=r(1, 2, 64)),
)
add(
    "LongCatAudioDiTVae",
    dict(channels=8, c_mults=[1, 2], strides=[2, 2], latent_dim=4, encoder_latent_dim=8, downsampling_ratio=4),
    lambda r: dict(sample=r(1, 1, 64)),
)
add(
    "MMAudioVAE",
    dict(
        mel_bins=8,
        latent_channels=4,
        hidden_channels=8,
        channel_multipliers=(1, 2),
        layers_per_block=1,
        n_fft=64,
        hop_length=16,
    ),
    lambda r: dict(sample=r.unit(1, 512)),
    dtypes=FP32,
)  # a Fourier transform
add(
    "MMAudioVocoder",
    dict(
        num_mels=8,
        upsample_initial_channel=16,
        upsample_rates=(2, 2),
        upsample_kernel_sizes=(4, 4),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3, 5),),
    ),
    lambda r: dict(mel=r(1, 8, 16)),
)
add(
    "MiniMaxMusic3Vocoder",
    dict(latent_channels=6, decoder_input_dim=8, decoder_hidden_dim=16, upsampling_ratios=(2, 2)),
    lambda r: dict(latents=r(1, 6, 8)),
)
