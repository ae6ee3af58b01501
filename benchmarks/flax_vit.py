"""Vision Transformer in Flax, with the structure and the names of the original; it loads the original's .npz files."""

import flax.linen as nn  # pyright: ignore[reportMissingImports] - a peer
import jax  # pyright: ignore[reportMissingImports] - a peer
import jax.numpy as jnp  # pyright: ignore[reportMissingImports] - a peer
import numpy as np


class MlpBlock(nn.Module):
    width: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens):
        hidden = nn.gelu(nn.Dense(self.width, dtype=self.dtype)(tokens))
        return nn.Dense(tokens.shape[-1], dtype=self.dtype)(hidden)


class EncoderBlock(nn.Module):
    heads: int
    mlp: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens):
        normed = nn.LayerNorm(dtype=self.dtype, name="LayerNorm_0")(tokens)
        attention = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype, name="MultiHeadDotProductAttention_1")
        tokens = tokens + attention(normed, normed)
        normed = nn.LayerNorm(dtype=self.dtype, name="LayerNorm_2")(tokens)
        return tokens + MlpBlock(self.mlp, self.dtype, name="MlpBlock_3")(normed)


class AddPositions(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        return tokens + self.param("pos_embedding", nn.initializers.normal(0.02), (1, *tokens.shape[1:]))


class Encoder(nn.Module):
    layers: int
    heads: int
    mlp: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens):
        tokens = AddPositions(name="posembed_input")(tokens)
        for index in range(self.layers):
            tokens = EncoderBlock(self.heads, self.mlp, self.dtype, name=f"encoderblock_{index}")(tokens)
        return nn.LayerNorm(dtype=self.dtype, name="encoder_norm")(tokens)


class VisionTransformer(nn.Module):
    patch: int
    hidden: int
    layers: int
    heads: int
    mlp: int
    classes: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, images):
        """Compute logits (batch, classes) of images (batch, height, width, channels)."""
        patch = (self.patch, self.patch)
        tokens = nn.Conv(self.hidden, patch, strides=patch, padding="VALID", dtype=self.dtype, name="embedding")(images)
        tokens = tokens.reshape(tokens.shape[0], -1, self.hidden)
        cls = self.param("cls", nn.initializers.zeros, (1, 1, self.hidden))
        tokens = jnp.concatenate([jnp.tile(cls, (tokens.shape[0], 1, 1)), tokens], axis=1)
        tokens = Encoder(self.layers, self.heads, self.mlp, self.dtype, name="Transformer")(tokens)
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(tokens[:, 0])


def load(path, sizes: dict, dtype: str):
    """Return a compiled function from images (batch, height, width, channels) to logits.

    Args:
        sizes: fields of the config.json.
        dtype: data type of the weights and of the computation.
    """
    model = VisionTransformer(
        sizes["patch_size"],
        sizes["hidden_size"],
        sizes["num_hidden_layers"],
        sizes["num_attention_heads"],
        sizes["intermediate_size"],
        len(sizes["id2label"]),
        jnp.dtype(dtype),
    )
    params: dict = {}
    with np.load(path) as arrays:
        for name in arrays.files:
            *folders, last = name.split("/")
            place = params
            for folder in folders:
                place = place.setdefault(folder, {})
            place[last] = jnp.asarray(arrays[name], dtype=dtype)
    apply = jax.jit(lambda params, images: model.apply({"params": params}, images))
    return lambda images: apply(params, images).block_until_ready()
