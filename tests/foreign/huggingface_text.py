"""Hugging Face's language and speech models, from small configurations."""

from .foreign import Call, Foreign, floats, integers
from .huggingface_model import model

_VOCABULARY = 96


def _tokens(batch: int) -> Call:
    return (), {"input_ids": integers(_VOCABULARY, batch, 12)}


def _padded(batch: int) -> Call:
    """Tokens of which the last sample's final four are padding."""
    ids = integers(_VOCABULARY, batch, 12, low=2)
    mask = ids.new_ones(batch, 12)
    mask[-1, 8:] = 0
    return (), {"input_ids": ids, "attention_mask": mask}


def _labelled(batch: int) -> Call:
    ids = integers(_VOCABULARY, batch, 12)
    return (), {"input_ids": ids, "labels": ids.clone()}


def _translation(batch: int) -> Call:
    source, target = integers(_VOCABULARY, batch, 12), integers(_VOCABULARY, batch, 7, seed=1)
    return (), {"input_ids": source, "labels": target}


def _sound(batch: int) -> Call:
    return (), {"input_values": floats(batch, 1600)}


def _spectrogram(batch: int) -> Call:
    return (), {"input_features": floats(batch, 16, 64), "decoder_input_ids": integers(_VOCABULARY, batch, 7)}


def _captioned(batch: int) -> Call:
    ids = integers(_VOCABULARY - 1, batch, 8)
    ids[:, -1] = _VOCABULARY - 1  # the end token, whose state is the sentence's
    return (), {"input_ids": ids, "pixel_values": floats(batch, 3, 32, 32), "return_loss": True}


_BERT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
_LLAMA = _BERT | {"num_key_value_heads": 2}
_T5 = {
    "vocab_size": _VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_DISTIL = {"vocab_size": _VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
_GPT2 = {"vocab_size": _VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
_MIXTRAL = _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
_QWEN_MOE = _LLAMA | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_WAV2VEC = _BERT | {
    "num_hidden_layers": 3,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_WHISPER = {
    "vocab_size": _VOCABULARY,
    "num_mel_bins": 16,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_source_positions": 32,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_MAMBA = {"vocab_size": _VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
_CLIP = {
    "text_config": _BERT | {"projection_dim": 16, "bos_token_id": 0, "eos_token_id": _VOCABULARY - 1},
    "vision_config": {
        "image_size": 32,
        "patch_size": 8,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    },
    "projection_dim": 16,
}

TEXT: tuple[Foreign, ...] = (
    model("gpt2", "GPT2LMHeadModel", _labelled, **_GPT2),  # tied embeddings; returns a key-value cache
    model("llama", "LlamaForCausalLM", _labelled, **_LLAMA),
    model("mistral", "MistralForCausalLM", _padded, **_LLAMA, sliding_window=8),
    model("qwen2", "Qwen2ForCausalLM", _padded, **_LLAMA),
    # tokens choose experts: a loop over those that were hit, nonzero, index_add_
    model("mixtral", "MixtralForCausalLM", _labelled, **_MIXTRAL, experts_implementation="eager"),
    # the same without a loop, by grouped matrix products; not in float64
    model("qwen2_moe", "Qwen2MoeForCausalLM", _tokens, **_QWEN_MOE, experts_implementation="grouped_mm"),
    model("mamba", "MambaForCausalLM", _tokens, **_MAMBA),
    model("bert", "BertModel", _padded, **_BERT),
    model("bert_eager", "BertForMaskedLM", _labelled, **_BERT, attn_implementation="eager"),
    model("distilbert", "DistilBertModel", _padded, **_DISTIL),
    model("roberta", "RobertaModel", _padded, **_BERT, pad_token_id=1),  # positions counted from input_ids
    model("albert", "AlbertModel", _tokens, **_BERT, embedding_size=16),  # one layer called for every depth
    model("t5_encoder", "T5EncoderModel", _tokens, **_T5),
    model("t5", "T5ForConditionalGeneration", _translation, **_T5),
    # the mask is drawn by numpy, whole layers are dropped by a host coin, and both change from step to step
    model(
        "wav2vec2_masked",
        "Wav2Vec2Model",
        _sound,
        **_WAV2VEC,
        layerdrop=0.3,
        mask_time_prob=0.3,
        mask_time_length=4,
    ),
    model("wav2vec2", "Wav2Vec2Model", _sound, **_WAV2VEC, layerdrop=0.0, apply_spec_augment=False),
    model("whisper", "WhisperModel", _spectrogram, **_WHISPER),
    model("clip", "CLIPModel", _captioned, **_CLIP),
)
