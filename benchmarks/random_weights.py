"""Random weights for benchmarks: a whole model, and packed weights made on the device without a bf16 original."""

import torch
from torch import nn

from redraft.config import ModelConfig
from redraft.kernels.fp8 import FP8_DTYPE, Fp8Tensor
from redraft.kernels.int4 import Int4Tensor
from redraft.kernels.nibbles import BLOCK
from redraft.kernels.nvfp4 import Nvfp4Tensor
from redraft.kernels.packed import PackedTensor
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.quant.layers import PackedExperts, PackedLinear

EXPERT_FORMATS = ("nvfp4", "int4", "int4 with minimum")


def random_model(config: ModelConfig, device: torch.device, experts: str | None = None) -> DiffusionGemma:
    """A model with random weights: bf16 (float32 on a CPU), or fp8 layers around 4-bit experts in the format `experts`."""
    with torch.device("meta"):
        model = DiffusionGemma(config).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    if experts is not None:
        for layer in model.layers:
            pack_randomly(layer, {"attention": "fp8", "dense": "fp8", "experts": experts}, generator)
    fill_randomly(model, generator)
    return model.eval().requires_grad_(False)


def random_packed(shape: tuple[int, ...], format: str, parts: int, generator: torch.Generator) -> PackedTensor:
    """Random codes with scales that make weights of about 0.02."""
    *rows, size = shape
    device = generator.device
    if format == "fp8":
        codes = torch.randint(0, 112, shape, dtype=torch.uint8, device=device, generator=generator)
        signs = torch.randint(0, 2, shape, dtype=torch.uint8, device=device, generator=generator)
        return Fp8Tensor(codes.add_(signs.mul_(128)).view(FP8_DTYPE), torch.full((*rows, 1), 1e-3, device=device))
    blocks = -(-size // BLOCK)
    codes = torch.randint(0, 256, (*rows, BLOCK // 2 * blocks), dtype=torch.uint8, device=device, generator=generator)
    # A mean other than zero would send all tokens to the same experts.
    if format == "nvfp4":
        scale = torch.randint(48, 64, (*rows, 4 * blocks), dtype=torch.uint8, device=device, generator=generator)
        return Nvfp4Tensor(codes, scale.view(FP8_DTYPE), torch.full((*rows[:-1], parts), 0.007, device=device))
    scale = torch.randn((*rows, 2 * blocks), device=device, generator=generator).mul_(0.005).bfloat16()
    return Int4Tensor(codes, scale, None if format == "int4" else -7.5 * scale)


def pack_randomly(layer: nn.Module, formats: dict[str, str | None], generator: torch.Generator) -> None:
    """Gives a layer random packed weights. `formats` are those of its parts; None: the part stays as it is."""
    for part, format in ((layer.self_attn, formats["attention"]), (layer.mlp, formats["dense"])):
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Linear) and format is not None:
                setattr(part, name, PackedLinear(random_packed(tuple(child.weight.shape), format, 1, generator)))
    if formats["experts"] is not None:
        gate_up, down = (tuple(weight.shape) for weight in (layer.experts.gate_up_proj, layer.experts.down_proj))
        layer.experts = PackedExperts(
            random_packed(gate_up, formats["experts"], 2, generator),
            random_packed(down, formats["experts"], 1, generator),
        )


def fill_randomly(model: nn.Module, generator: torch.Generator) -> None:
    """Replaces parameters and buffers on the meta device: norms and scalars are one, matrices small, the router sharp."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta:
            continue
        weight = torch.ones(tensor.shape, dtype=tensor.dtype, device=generator.device)
        if weight.dim() > 1:
            weight.normal_(0, 1.0 if "router.proj" in name else 0.02, generator=generator)
        parent, _, last = name.rpartition(".")
        is_parameter = isinstance(tensor, nn.Parameter)
        setattr(model.get_submodule(parent), last, nn.Parameter(weight, requires_grad=False) if is_parameter else weight)
