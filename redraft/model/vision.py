"""Vision: Gemma 4's vision tower and the projection into the text model. Patches of a picture -> features of image tokens.

A picture runs alone and without padding, so its features do not depend on other pictures. Weights have the published names
behind "model.encoder."; text-only use never builds or loads them. `ImageSpan` says where features stand in a prompt.
Shapes: N patches of a picture, P numbers of a patch, D size of the tower, H heads, G key-value heads, K head size, M image
tokens, E size of the text model.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.config.vision import VisionConfig
from redraft.kernels import apply_rope, attend, rms_norm, rope_table
from redraft.model.layers import RMSNorm, Rope, gelu


class ImageSpan(NamedTuple):
    """The features of an image, and the index of its first image token in the prompt."""

    start: int
    features_ME: Tensor
    digest: bytes = b""  # of the picture: images with the same one have the same features. Without one, these are compared

    @property
    def end(self) -> int:
        """The index behind its last image token."""
        return self.start + len(self.features_ME)


class ClippableLinear(nn.Module):
    """A linear layer whose inputs and outputs are clamped, if the configuration says so."""

    def __init__(self, config: VisionConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.is_clipped = config.use_clipped_linears
        if self.is_clipped:
            for name in ("input", "output"):
                self.register_buffer(f"{name}_min", torch.tensor(-torch.inf))
                self.register_buffer(f"{name}_max", torch.tensor(torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs."""
        if not self.is_clipped:
            return self.linear(x)
        x = self.linear(torch.clamp(x, self.input_min, self.input_max))
        return torch.clamp(x, self.output_min, self.output_max)


class PatchEmbedder(nn.Module):
    """Embeds patches, and adds a learned embedding of the column and one of the row."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.input_proj = nn.Linear(config.patch_values, config.hidden_size, bias=False)
        self.position_embedding_table = nn.Parameter(torch.empty(2, config.position_embedding_size, config.hidden_size))

    def forward(self, patches_NP: Tensor, positions_N2: Tensor) -> Tensor:
        """Returns [N, D]. Values from 0 to 1 become -1 to 1 in the precision in which they come, as in transformers."""
        table = self.position_embedding_table
        x_ND = self.input_proj((2 * (patches_NP - 0.5)).to(table.dtype))
        return x_ND + (F.embedding(positions_N2[:, 0], table[0]) + F.embedding(positions_N2[:, 1], table[1]))


class VisionAttention(nn.Module):
    """Attention of all patches to all patches. The first half of a head turns with the column, the second with the row."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        size = config.hidden_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = ClippableLinear(config, size, queries)
        self.k_proj = ClippableLinear(config, size, keys)
        self.v_proj = ClippableLinear(config, size, keys)
        self.o_proj = ClippableLinear(config, queries, size)
        self.q_norm = RMSNorm(config.head_dim, self.eps)
        self.k_norm = RMSNorm(config.head_dim, self.eps)

    def forward(self, x_1ND: Tensor, ropes: Sequence[Rope]) -> Tensor:
        """Returns [1, N, D]."""
        heads = (-1, self.head_dim)
        q_1NHK = _rotate(self.q_norm(self.q_proj(x_1ND).unflatten(-1, heads)), ropes)
        k_1NGK = _rotate(self.k_norm(self.k_proj(x_1ND).unflatten(-1, heads)), ropes)
        v_1NGK = rms_norm(self.v_proj(x_1ND).unflatten(-1, heads), None, self.eps)
        return self.o_proj(attend(q_1NHK, k_1NGK, v_1NGK, None))


def _rotate(x_1NHK: Tensor, ropes: Sequence[Rope]) -> Tensor:
    """RoPE in two dimensions: half of a head for each."""
    halves = x_1NHK.chunk(2, dim=-1)
    return torch.cat([apply_rope(half, *rope) for half, rope in zip(halves, ropes, strict=True)], dim=-1)


class VisionMLP(nn.Module):
    """down(gelu(gate(x)) * up(x)), of clippable layers."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.gate_proj = ClippableLinear(config, config.hidden_size, config.intermediate_size)
        self.up_proj = ClippableLinear(config, config.hidden_size, config.intermediate_size)
        self.down_proj = ClippableLinear(config, config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the same shape as x."""
        return self.down_proj(gelu(self.gate_proj(x)) * self.up_proj(x))


class VisionLayer(nn.Module):
    """Attention, then the MLP, each between two norms."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.self_attn = VisionAttention(config)
        self.mlp = VisionMLP(config)
        self.input_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(size, config.rms_norm_eps)

    def forward(self, x_1ND: Tensor, ropes: Sequence[Rope]) -> Tensor:
        """Returns the next residual stream."""
        x_1ND = x_1ND + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x_1ND), ropes))
        return x_1ND + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_1ND)))


class VisionEncoder(nn.Module):
    """The layers of a vision tower. A module of its own for the names of the weights."""

    layers: Sequence[VisionLayer]

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_hidden_layers))
        self.layers = cast(Sequence[VisionLayer], layers)


class VisionTower(nn.Module):
    """Patches of a picture -> one vector for each square of patches."""

    std_bias: Tensor
    std_scale: Tensor

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedder = PatchEmbedder(config)
        self.encoder = VisionEncoder(config)
        if config.standardize:
            self.register_buffer("std_bias", torch.zeros(config.hidden_size))
            self.register_buffer("std_scale", torch.ones(config.hidden_size))

    def run_in_parts(self, patches_NP: Tensor, positions_N2: Tensor, layers: int) -> Iterator[Tensor | None]:
        """Runs so many layers at a time. Yields None after each part and, at last, the vectors [M, D].

        The picture has whole squares: M is N divided by the patches of a square.
        """
        c = self.config
        x_1ND = self.patch_embedder(patches_NP, positions_N2)[None]
        ropes = [rope_table(axis_N[None], c.head_dim // 2, c.rope_theta, 1.0, x_1ND.dtype) for axis_N in positions_N2.T]
        for number, layer in enumerate(self.encoder.layers):
            if number and number % layers == 0:
                yield None
            x_1ND = layer(x_1ND, ropes)
        # Pooled features times sqrt(D) may exceed float16, and the bias cancels large numbers: both are in float32.
        pooled_MD = pool_squares(x_1ND[0], positions_N2, c.pooling_kernel_size).float() * c.hidden_size**0.5
        if c.standardize:
            pooled_MD = (pooled_MD - self.std_bias.float()) * self.std_scale.float()
        yield pooled_MD.to(x_1ND.dtype)


def pool_squares(x_ND: Tensor, positions_N2: Tensor, kernel: int) -> Tensor:
    """The mean of each square of patches, row by row of squares."""
    columns = int(positions_N2[:, 0].max()) + 1
    rows = len(x_ND) // columns
    squares = x_ND.float().view(rows // kernel, kernel, columns // kernel, kernel, -1)
    return (squares / kernel**2).sum(dim=(1, 3)).flatten(0, 1).to(x_ND.dtype)


class VisionProjection(nn.Module):
    """Norms the vectors of the tower and projects them to the size of the text model."""

    def __init__(self, config: VisionConfig, text_size: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.embedding_projection = nn.Linear(config.hidden_size, text_size, bias=False)

    def forward(self, x_MD: Tensor) -> Tensor:
        """Returns [M, E]."""
        return self.embedding_projection(rms_norm(x_MD, None, self.eps))


class Vision(nn.Module):
    """The vision tower and the projection: what a text model lacks to take images."""

    def __init__(self, config: VisionConfig, text_size: int) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = VisionTower(config)
        self.embed_vision = VisionProjection(config, text_size)

    def encode_image(self, patches_NP: Tensor, positions_N2: Tensor) -> Tensor:
        """The features [M, E] of one picture, which take the place of the embeddings of its image tokens."""
        (features_ME,) = self.encode_in_parts(patches_NP, positions_N2, self.config.num_hidden_layers)
        assert features_ME is not None
        return features_ME

    @torch.inference_mode()
    def encode_in_parts(self, patches_NP: Tensor, positions_N2: Tensor, layers: int) -> Iterator[Tensor | None]:
        """The same, so many layers at a time: yields None after each part and, at last, the features."""
        device = self.embed_vision.embedding_projection.weight.device
        for pooled_MD in self.vision_tower.run_in_parts(patches_NP.to(device), positions_N2.to(device), layers):
            yield self.embed_vision(pooled_MD) if pooled_MD is not None else None

    def count_layer_products(self, patches: int) -> int:
        """Multiplications of one layer over a picture: each patch with the layer's weights, and with all patches."""
        weights = sum(weight.numel() for weight in self.vision_tower.encoder.layers[0].parameters())
        attention = 2 * patches * self.config.num_attention_heads * self.config.head_dim
        return patches * (weights + attention)
