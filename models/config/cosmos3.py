"""Cosmos3 Nano and Super: the reasoner is Qwen3-VL under other names, stored with a generator's weights in Diffusers' layout. Names as in
transformers' conversion of `cosmos3_omni`; older files have `q_proj`, newer ones `to_q`."""

COSMOS3_FILES = ("transformer/*.safetensors", "vision_encoder/*.safetensors")

COSMOS3_RENAMES = (
    (r"^(layers|embed_tokens|norm)\.", r"model.language_model.\1."),
    (r"^(blocks|merger|patch_embed|pos_embed|deepstack_merger_list)\.", r"model.visual.\1."),
    (r"(language_model\..*self_attn\.)to_(q|k|v)\.", r"\1\2_proj."),
    (r"(language_model\..*self_attn\.)to_out\.(0\.)?", r"\1o_proj."),
    (r"(language_model\..*self_attn\.)norm_(q|k)\.", r"\1\2_norm."),
)

COSMOS3_DROPPED = (  # the generator
    r"_moe_gen|add_[qkv]_proj|to_add_out|norm_added_[qk]|_quantizer\.|"
    r"^(proj_in|proj_out|time_embedder|audio_proj_\w*|action_proj_\w*|audio_modality_embed|action_modality_embed)\b"
)
