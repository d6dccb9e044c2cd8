"""The GPT of this benchmark in megatron-core's tensor-parallel layers, where that package is
installed.

Its layers and its cross-entropy are taken as they are; attention and norms are torch's, as in every
other row, because megatron-core's own attention needs a GPU. Activations are [S, B, D], as its
sequence parallel wants them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import World


class Block(nn.Module):
    """As plait's GPT block."""

    def __init__(self, core: Any, keys: dict[str, Any], width: int, sequence: bool) -> None:
        super().__init__()
        column = {**keys, "gather_output": False}
        row = {**keys, "input_is_parallel": True, "skip_bias_add": False}
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (
            core.ColumnParallelLinear(width, width, **column) for _ in range(3)
        )
        self.o = core.RowParallelLinear(width, width, **row)
        self.up = core.ColumnParallelLinear(width, 4 * width, **column)
        self.down = core.RowParallelLinear(4 * width, width, **row)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm1(x)
        q, k, v = (self.heads(projection(normal)[0]) for projection in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.permute(2, 0, 1, 3).flatten(2))[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))[0], approximate="tanh"))[0]

    @staticmethod
    def heads(x: Tensor) -> Tensor:
        """[S, B, H K] -> [B, H, S, K]."""
        return x.unflatten(-1, (-1, 64)).permute(1, 2, 0, 3)


class GPT(nn.Module):
    """Token numbers [B, S] -> each token's loss."""

    def __init__(
        self, core: Any, config: Any, sizes: tuple[int, int, int, int], sequence: bool
    ) -> None:
        super().__init__()
        layers, width, length, vocabulary = sizes
        keys = {
            "config": config,
            "init_method": lambda weight: nn.init.normal_(weight, std=0.02),
            "bias": True,
        }
        self.core = core
        self.sequence = sequence
        self.embed = core.VocabParallelEmbedding(
            vocabulary,
            width,
            init_method=keys["init_method"],
            config=config,
            reduce_scatter_embeddings=sequence,
        )
        self.position = nn.Parameter(torch.randn(length, 1, width) * 0.02)
        self.blocks = nn.ModuleList(Block(core, keys, width, sequence) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = core.ColumnParallelLinear(
            width, vocabulary, **{**keys, "bias": False, "gather_output": False}
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = (
            x if self.sequence else x.transpose(0, 1).contiguous()
        )  # its embedding transposes where it scatters
        length = x.shape[0]
        start = torch.distributed.get_rank() * length if self.sequence else 0
        x = x + self.position[start : start + length]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[0]
        return self.core.vocab_parallel_cross_entropy(
            logits.contiguous(), targets.t().contiguous()
        ).mean()


def megatron(
    *,
    sequence: bool,
    sizes: tuple[int, int, int, int],
    batch: Callable[[], tuple[Tensor, Tensor]],
    adamw: Any,
) -> Callable[[World], Callable[[], Any]]:
    """A step of it. Raises `ImportError` where megatron-core is not installed."""

    def make(world: World) -> Callable[[], Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core import parallel_state, tensor_parallel
            from megatron.core.transformer import TransformerConfig

        torch.cuda.current_device = lambda: torch.device(
            "cpu"
        )  # where its sequence parallel makes its buffers
        if not parallel_state.is_initialized():
            with contextlib.suppress(ImportError):
                parallel_state.initialize_model_parallel(tensor_model_parallel_size=world.size)
        config = TransformerConfig(
            num_layers=sizes[0],
            hidden_size=sizes[1],
            num_attention_heads=sizes[1] // 64,
            tensor_model_parallel_size=world.size,
            sequence_parallel=sequence,
            use_cpu_initialization=True,
            params_dtype=torch.float32,
            gradient_accumulation_fusion=False,
        )
        torch.manual_seed(0)
        model = GPT(tensor_parallel, config, sizes, sequence)
        optimizer = adamw(model.parameters())
        inputs, targets = batch()
        shared = [
            p
            for name, p in model.named_parameters()
            if "norm" in name or name == "position" or _row_bias(name)
        ]

        def step() -> None:
            model(inputs, targets).backward()
            if sequence:  # gradients of what every rank holds are those of its own tokens
                together = torch.cat([p.grad.reshape(-1) for p in shared if p.grad is not None])
                torch.distributed.all_reduce(
                    together, group=parallel_state.get_tensor_model_parallel_group()
                )
                parts = together.split([p.numel() for p in shared])
                for param, part in zip(shared, parts, strict=True):
                    assert param.grad is not None
                    param.grad.copy_(part.view_as(param.grad))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return make


def _row_bias(name: str) -> bool:
    return name.endswith(("o.bias", "down.bias"))
