"""Keras models with what tutorials leave out: masks, dilation on odd sizes, states, several outputs, wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.keras.oracle import keras

L = keras.layers
K = keras.ops

MODELS: dict[str, Callable[[], Any]] = {}


def odd(make: Callable[[], Any]) -> Callable[[], Any]:
    MODELS[make.__name__] = make
    return make


@odd
def attention_with_a_mask() -> Any:
    x, mask = keras.Input((5, 8)), keras.Input((5, 5), dtype="bool")
    y = L.MultiHeadAttention(2, 4)(x, x, attention_mask=mask)
    return keras.Model([x, mask], L.Dense(2)(y))


@odd
def attention_with_a_computed_mask() -> Any:
    x = keras.Input((5, 8))
    mask = K.expand_dims(K.arange(5), 1) >= K.arange(5)
    return keras.Model(x, L.MultiHeadAttention(2, 4)(x, x, attention_mask=K.expand_dims(mask, 0)))


@odd
def attention_over_two_axes() -> Any:
    x = keras.Input((3, 4, 8))
    return keras.Model(x, L.MultiHeadAttention(2, 4, attention_axes=(1, 2))(x, x))


@odd
def grouped_query_attention() -> Any:
    x = keras.Input((5, 8))
    return keras.Model(x, L.GroupQueryAttention(4, 4, 2)(x, x, use_causal_mask=True))


@odd
def dilated_and_separable_on_odd_sizes() -> Any:
    x = given = keras.Input((11, 7, 3))
    x = L.DepthwiseConv2D((3, 2), padding="same", dilation_rate=(2, 2), depth_multiplier=2)(x)
    x = L.SeparableConv2D(5, (2, 3), padding="same", dilation_rate=(2, 2), depth_multiplier=2)(x)
    x = L.Conv2D(4, (4, 3), padding="same", dilation_rate=(1, 3))(x)
    x = L.SeparableConv2D(4, 4, strides=3, padding="same")(x)
    return keras.Model(given, L.DepthwiseConv2D(2, strides=2, padding="same")(x))


@odd
def transposed_with_output_padding() -> Any:
    x = given = keras.Input((5, 7, 2))
    x = L.Conv2DTranspose(3, 3, strides=3, padding="same", output_padding=(2, 1))(x)
    x = L.Conv2DTranspose(2, (2, 3), padding="valid", dilation_rate=2)(x)
    return keras.Model(given, L.Conv2DTranspose(2, 2, strides=3, padding="valid")(x))


@odd
def one_layer_called_three_times() -> Any:
    x = given = keras.Input((9, 9, 4))
    conv, norm = L.Conv2D(4, 3, padding="same", name="conv"), L.BatchNormalization(name="norm")
    for _ in range(3):
        x = L.Add()([x, L.Activation("tanh")(norm(conv(x)))])
    return keras.Model(given, x)


@odd
def nested_with_several_outputs() -> Any:
    a = keras.Input((6, 6, 3))
    low = L.Conv2D(4, 3, padding="same")(a)
    inner = keras.Model(a, {"low": low, "high": L.Conv2D(4, 3, strides=2, padding="same")(low)}, name="pyramid")
    b = keras.Input((6, 6, 3))
    first, second = inner(b), inner(b * 2.0)
    x = L.UpSampling2D()(first["high"]) + second["low"]
    return keras.Model(b, {"sum": x, "high": L.GlobalMaxPooling2D()(second["high"])})


@odd
def nested_twice_with_a_shared_base() -> Any:
    base = keras.Sequential([keras.Input((8,)), L.Dense(6, activation="relu"), L.LayerNormalization()], name="base")
    inner_in = keras.Input((8,))
    inner = keras.Model(inner_in, [base(inner_in), base(-inner_in)], name="middle")
    given = keras.Input((8,))
    p, q = inner(given)
    return keras.Model(given, L.Subtract()([p, q]) + base(given))


@odd
def noise_while_training() -> Any:
    given = keras.Input((6,))
    x = L.GaussianDropout(0.2)(L.GaussianNoise(0.3)(L.Dense(5)(given)))
    return keras.Model(given, L.AlphaDropout(0.1)(x))


@odd
def group_normalization_of_all_kinds() -> Any:
    x = given = keras.Input((5, 4, 6))
    x = L.GroupNormalization(1)(x)
    x = L.GroupNormalization(6, scale=False)(L.Conv2D(6, 1)(x))
    return keras.Model(given, L.GroupNormalization(2, epsilon=0.01)(x))


@odd
def states_of_all_kinds() -> Any:
    given = keras.Input((6, 3))
    x, h, _ = L.LSTM(4, return_sequences=True, return_state=True, go_backwards=True)(given)
    made = L.Bidirectional(L.GRU(3, return_sequences=True, return_state=True))(x)
    y, forward, backward = made
    z = L.SimpleRNN(4, unroll=True)(y, initial_state=h)
    return keras.Model(given, [z, forward, backward])


@odd
def stacked_cells() -> Any:
    given = keras.Input((6, 3))
    x = L.RNN([L.LSTMCell(4), L.GRUCell(3)], return_sequences=True)(given)
    return keras.Model(given, L.RNN(L.SimpleRNNCell(2))(x))


@odd
def convolutional_lstm() -> Any:
    given = keras.Input((3, 6, 5, 2))
    return keras.Model(given, L.ConvLSTM2D(3, 3, padding="same")(given))


@odd
def spectral_normalization() -> Any:
    given = keras.Input((6,))
    return keras.Model(given, L.SpectralNormalization(L.Dense(4))(given))


@odd
def stateful_lstm() -> Any:
    given = keras.Input((6, 3), batch_size=2)
    return keras.Model(given, L.LSTM(4, stateful=True)(given))


@odd
def encoded_categories() -> Any:
    tokens, values = keras.Input((4,), dtype="int32"), keras.Input((3,))
    one = L.CategoryEncoding(7, output_mode="multi_hot")(tokens)
    return keras.Model([tokens, values], L.Dense(2)(L.Concatenate()([one, L.Dense(3)(values)])))


@odd
def cut_in_the_middle() -> Any:
    given = keras.Input((9, 10, 3))
    return keras.Model(given, L.Conv2D(2, 3)(L.CenterCrop(6, 5)(given)))


@odd
def every_merge() -> Any:
    a, b, c = keras.Input((5, 4)), keras.Input((5, 4)), keras.Input((5, 4))
    x, y, z = (L.Dense(4, name=f"dense_{n}")(v) for n, v in zip("abc", (a, b, c), strict=True))
    made = [L.Average()([x, y, z]), L.Maximum()([x, y, z]), L.Minimum()([x, y]), L.Multiply()([x, y, z])]
    return keras.Model([a, b, c], [L.Concatenate(axis=1)(made), L.Dot(axes=(2, 2), normalize=True)([x, y])])


@odd
def an_output_that_is_inside_and_one_twice() -> Any:
    given = keras.Input((6,))
    x = L.Dense(5, name="first")(given)
    y = L.Dense(3)(L.Identity()(x))
    return keras.Model(given, [x, y, y, given])


@odd
def adaptive_pools() -> Any:
    given = keras.Input((9, 7, 3))
    x = L.Conv2D(4, 1)(given)
    return keras.Model(given, [L.AdaptiveAveragePooling2D((4, 3))(x), L.AdaptiveMaxPooling2D((2, 3))(x)])


@odd
def a_loss_of_its_own() -> Any:
    given = keras.Input((6,))
    return keras.Model(given, L.ActivityRegularization(l2=0.1, name="penalty")(L.Dense(3)(given)))


@odd
def einsum_of_four_dimensions() -> Any:
    given = keras.Input((3, 4, 5))
    x = L.EinsumDense("abcx,xy->abcy", (3, 4, 7), bias_axes="y", activation="relu")(given)
    return keras.Model(given, K.einsum("abij,abkj->abik", x, x))


@odd
def a_model_as_a_layer_of_a_sequence() -> Any:
    frame = keras.Sequential([keras.Input((6, 6, 2)), L.Conv2D(3, 3), L.GlobalMaxPooling2D()], name="frame")
    given = keras.Input((4, 6, 6, 2))
    return keras.Model(given, L.Bidirectional(L.LSTM(3))(L.TimeDistributed(frame)(given)))


@odd
def masked_embedding() -> Any:
    tokens = keras.Input((6,), dtype="int32")
    return keras.Model(tokens, L.LSTM(4)(L.Embedding(9, 4, mask_zero=True, name="words")(tokens)))


@odd
def squeezed_and_excited() -> Any:
    x = given = keras.Input((7, 5, 4))
    s = L.GlobalAveragePooling2D(keepdims=True)(x)
    s = L.Conv2D(4, 1, activation="sigmoid")(L.Conv2D(2, 1, activation="silu")(s))
    return keras.Model(given, L.Conv2D(3, 3, strides=2, padding="same")(x * s))
