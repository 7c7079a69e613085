"""Models with what tutorials leave out: carried over exactly, or refused by the path of the layer."""

from __future__ import annotations

import pytest

import outcore.keras
from outcore.errors import ModelError
from tests.keras.odd_models import MODELS
from tests.keras.oracle import compare

REFUSED = {
    "attention_over_two_axes": r"functional/multi_head_attention \(MultiHeadAttention\).*reshape them",
    "grouped_query_attention": r"functional/\w+ \(Group\w*Attention\).*layers=",
    "transposed_with_output_padding": r"functional/conv2d_transpose \(Conv2DTranspose\).*output_padding=\(2, 1\)",
    "noise_while_training": r"functional/alpha_dropout \(AlphaDropout\).*layers=",
    "stacked_cells": r"functional/rnn \(RNN\).*layers=",
    "convolutional_lstm": r"functional/conv_lstm2d \(ConvLSTM2D\).*layers=",
    "spectral_normalization": r"functional/spectral_normalization \(SpectralNormalization\).*layers=",
    "stateful_lstm": r"functional/lstm \(LSTM\).*stateful=True; pass the state as an input",
    "a_loss_of_its_own": r"functional/penalty \(ActivityRegularization\)",
    "masked_embedding": r"functional/words \(Embedding\).*mask_zero=True.*pass a mask as an input",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_an_odd_model_is_carried_over_or_refused_by_its_path(name: str) -> None:
    model = MODELS[name]()
    if name not in REFUSED:
        compare(model, steps=2)
        return
    with pytest.raises(ModelError, match=REFUSED[name]):
        outcore.keras.to_torch(model)
