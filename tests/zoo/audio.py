"""diffusers transformers for audio, small encoders and projections, molecules."""

import torch

from .base import add, exclude

# --- audio DiTs

add(
    "StableAudioDiTModel",
    dict(
        sample_size=8,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_attention_heads=2,
        out_channels=4,
        cross_attention_dim=18,
        time_proj_dim=8,
        global_states_input_dim=14,
        cross_attention_input_dim=18,
    ),
    lambda r: dict(
        hidden_states=r(2, 4, 8),
        timestep=r.unit(2),
        encoder_hidden_states=r(2, 5, 18),
        global_hidden_states=r(2, 1, 14),
        rotary_embedding=(r.unit(9, 4), r.unit(9, 4)),
    ),
)
add(
    "StableAudio3DiTModel",
    dict(
        io_channels=6,
        embed_dim=48,
        depth=3,
        num_heads=3,
        cond_token_dim=18,
        global_cond_dim=14,
        local_add_cond_dim=7,
        timestep_features_dim=16,
        ff_mult=1.5,
        num_memory_tokens=5,
    ),
    lambda r: dict(
        hidden_states=r(1, 6, 8),
        timestep=r.unit(1),
        encoder_hidden_states=r(1, 5, 18),
        global_hidden_states=r(1, 14),
        local_add_cond=r(1, 7, 8),
    ),
)
add(
    "LongCatAudioDiTTransformer",
    dict(dit_dim=24, dit_depth=3, dit_heads=3, dit_text_dim=18, latent_dim=6, ff_mult=1.5),
    lambda r: dict(
        hidden_states=r(1, 8, 6),
        encoder_hidden_states=r(1, 5, 18),
        encoder_attention_mask=r.ones(1, 5, dtype=torch.bool),
        timestep=r.unit(1),
        attention_mask=r.ones(1, 8, dtype=torch.bool),
        latent_cond=r(1, 8, 6),
    ),
)
_ACE = dict(
    hidden_size=24, intermediate_size=34, num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=4
)
add(
    "AceStepTransformer1DModel",
    dict(_ACE, num_hidden_layers=4, in_channels=18, audio_acoustic_hidden_dim=6),
    lambda r: dict(
        hidden_states=r(1, 8, 6),
        timestep=r.unit(1),
        timestep_r=r.unit(1),
        encoder_hidden_states=r(1, 5, 24),
        context_latents=r(1, 8, 12),
    ),
)
add(
    "AceStepConditionEncoder",
    dict(
        _ACE,
        text_hidden_dim=18,
        timbre_hidden_dim=6,
        num_lyric_encoder_hidden_layers=3,
        num_timbre_encoder_hidden_layers=2,
    ),
    lambda r: dict(
        text_hidden_states=r(1, 5, 18),
        text_attention_mask=r.ones(1, 5),
        lyric_hidden_states=r(1, 7, 18),
        lyric_attention_mask=r.ones(1, 7),
        refer_audio_acoustic_hidden_states_packed=r(1, 9, 6),
        refer_audio_order_mask=r.ids(1, 1),
    ),
)
add(
    "AceStepAudioTokenizer",
    dict(
        _ACE,
        audio_acoustic_hidden_dim=6,
        pool_window_size=2,
        fsq_dim=24,
        num_attention_pooler_hidden_layers=3,
        fsq_input_levels=[4, 3, 5],
    ),
    lambda r: dict(hidden_states=r(1, 4, 2, 6)),
)
add(
    "AceStepAudioTokenDetokenizer",
    dict(_ACE, audio_acoustic_hidden_dim=6, pool_window_size=2, num_attention_pooler_hidden_layers=3),
    lambda r: dict(hidden_states=r(1, 4, 24)),
)
add(
    "MiniMaxMusic3Transformer1DModel",
    dict(
        in_channels=6,
        condition_dim=18,
        num_layers=3,
        num_attention_heads=3,
        attention_head_dim=8,
        ff_inner_dim=34,
        rotary_dim=4,
        fourier_embedding_dim=8,
    ),
    lambda r: dict(hidden_states=r(1, 6, 8), timestep=r.unit(1), encoder_hidden_states=r(1, 8, 18)),
)
add(
    "MiniMaxMusic3ConditionEncoder",
    dict(
        condition_hidden_dim=18,
        num_condition_layers=3,
        out_dim=14,
        input_sampling_rate=8,
        input_hop_length=2,
        output_sampling_rate=8,
        output_hop_length=1,
    ),
    lambda r: dict(hidden_states=r(1, 6, 3 * 18)),
)
add(
    "MiniMaxMusic3RVQDepthDecoder",
    dict(
        hidden_size=24, num_layers=3, num_attention_heads=3, intermediate_size=34, audio_vocab_size=13, num_codebooks=3
    ),
    lambda r: dict(inputs_embeds=r(1, 4, 24)),
)
add(
    "T5FilmDecoder",
    dict(input_dims=10, targets_length=8, d_model=24, num_layers=3, num_heads=3, d_kv=6, d_ff=34),
    lambda r: dict(
        encodings_and_masks=[(r(1, 5, 24), r.ones(1, 5))],
        decoder_input_tokens=r(1, 8, 10),
        decoder_noise_time=r.unit(1),
    ),
)

# --- encoders and projections

add(
    "AnimaTextConditioner",
    dict(
        source_dim=18,
        target_dim=24,
        model_dim=24,
        num_layers=3,
        num_attention_heads=3,
        mlp_ratio=1.5,
        target_vocab_size=53,
        min_sequence_length=8,
    ),
    lambda r: dict(
        source_hidden_states=r(1, 5, 18),
        target_input_ids=r.ids(53, 1, 6),
        target_attention_mask=r.ones(1, 6),
        source_attention_mask=r.ones(1, 5),
    ),
)
add(
    "AudioLDM2ProjectionModel",
    dict(text_encoder_dim=18, text_encoder_1_dim=14, langauge_model_dim=22),
    lambda r: dict(
        hidden_states=r(1, 5, 18),
        hidden_states_1=r(1, 6, 14),
        attention_mask=r.ones(1, 5),
        attention_mask_1=r.ones(1, 6),
    ),
)
add(
    "AudioLDM2ProjectionModel",
    dict(
        text_encoder_dim=18,
        text_encoder_1_dim=14,
        langauge_model_dim=22,
        use_learned_position_embedding=True,
        max_seq_length=6,
    ),
    lambda r: dict(
        hidden_states=r(1, 5, 18),
        hidden_states_1=r(1, 6, 14),
        attention_mask=r.ones(1, 5),
        attention_mask_1=r.ones(1, 6),
    ),
    suffix="positions",
)
add(
    "StableAudioProjectionModel",
    dict(text_encoder_dim=18, conditioning_dim=14, min_value=0, max_value=512),
    lambda r: dict(text_hidden_states=r(1, 5, 18), start_seconds=r.full(1.0, 1), end_seconds=r.full(30.0, 1)),
)
add("StableAudio3DurationEmbedder", dict(output_dim=18, fourier_dim=16), lambda r: dict(seconds=r.full(30.0, 1)))
add("CLIPImageProjection", dict(hidden_size=18), lambda r: dict(x=r(2, 18)))
add("ReduxImageEncoder", dict(redux_dim=18, txt_in_features=14), lambda r: dict(x=r(2, 5, 18)))
add("Ideogram4PromptEnhancerHead", dict(hidden_size=18, vocab_size=53), lambda r: dict(hidden_states=r(2, 5, 18)))
exclude(
    "UniDiffuserTextDecoder",
    "diffusers cannot save it as safetensors (its lm_head is tied to the embedding); pickled checkpoints only",
)

# --- molecules


def _residues(r):
    return dict(
        is_in_context_conditioning=torch.zeros(1, 7, dtype=torch.bool),
        supports_local_latent=r.ones(1, 7, dtype=torch.bool),
    )


add(
    "RFD4ProteinaTransformer",
    dict(
        nlayers=3,
        token_dim=24,
        nheads=3,
        dim_cond=18,
        pair_repr_dim=12,
        latent_dim=6,
        token_type_emb_dim=4,
        cath_emb_dim=4,
        t_emb_dim=8,
        seq_sep_dim=8,
        xt_pair_dist_dim=5,
        tri_mult_c=10,
        num_sequence_classes=11,
        feats_seq=("xt_bb_ca", "xt_local_latents", "token_type"),
        feats_pair_repr=("xt_bb_ca_pair_dists",),
    ),
    lambda r: dict(
        bb_ca=r(1, 7, 3),
        local_latents=r(1, 7, 6),
        bb_ca_time=r.unit(1),
        local_latents_time=r.unit(1),
        padding_mask=r.ones(1, 7, dtype=torch.bool),
        token_type=r.ids(7, 1, 7),
        conditioning=_residues(r),
        recycle_depth=2,
    ),
)
add(
    "RFD4ProteinaAutoencoder",
    dict(
        atom37_mask=[[True] * 37] * 11,
        allowed_residue_types=[[True] * 11] * 7,
        latent_dim=6,
        n_residue_types=11,
        nlayers=3,
        token_dim=24,
        nheads=3,
        dim_cond=18,
        pair_repr_dim=12,
        token_type_emb_dim=4,
    ),
    lambda r: dict(
        z_latent=r(1, 7, 6),
        ca_coors_nm=r(1, 7, 3),
        padding_mask=r.ones(1, 7, dtype=torch.bool),
        token_type=r.ids(7, 1, 7),
        conditioning=_residues(r),
    ),
)
