"""Models without a sequence: multi-layer perceptrons, residual networks and Fourier operators, a
sample being one token.

A convolution is a matrix product over its output pixels, which is how its cost and its memory
behave.
"""

from __future__ import annotations

from plait.predict.cost.model.operations import (
    Block,
    Elementwise,
    Matmul,
    Model,
    Operation,
    Saved,
    Split,
)

RESNET_STAGES = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
"""Blocks in each stage by depth (He et al., "Deep Residual Learning", table 1)."""


def mlp_model(
    in_features: int, hidden_size: int, num_hidden_layers: int, out_features: int
) -> Model:
    """`num_hidden_layers` hidden layers, columns and rows in turn as a tensor axis splits them, and
    an output layer.
    """
    runs: list[tuple[Block, int]] = []
    for index in range(num_hidden_layers):
        paired = index < num_hidden_layers - num_hidden_layers % 2
        split: Split = "none" if not paired else "row" if index % 2 else "column"
        runs.append(
            (
                _dense(
                    in_features if index == 0 else hidden_size, hidden_size, split, raw=index == 0
                ),
                1,
            )
        )
    last = Block(
        "head",
        (Matmul("output", hidden_size, out_features, "none", bias=True),),
        Saved(sequence=float(hidden_size), tensor=2.0 * out_features),
        out_features,
    )
    sizes = {
        "num_hidden_layers": num_hidden_layers - 1,
        "intermediate_size": hidden_size,
        "num_local_experts": 0,
    }
    return Model("mlp", (*_merge(runs), (last, 1)), seq_len=1, hidden=hidden_size, sizes=sizes)


def _dense(inputs: int, outputs: int, split: Split, raw: bool) -> Block:
    operations: tuple[Operation, ...] = (
        Matmul("linear", inputs, outputs, split, bias=True, raw=raw),
        Elementwise("activation", outputs, outputs, "heads" if split == "column" else "none"),
    )
    kept = Saved(sequence=float(inputs), tensor=float(outputs))
    return Block("layer", operations, kept, outputs)


def resnet_model(
    depth: int, num_classes: int, width: int = 64, in_channels: int = 3, image: int = 32
) -> Model:
    """A residual network: basic blocks to depth 34, bottlenecks beyond. `image` is the side of the
    input in pixels.
    """
    stages = RESNET_STAGES[min(RESNET_STAGES, key=lambda known: abs(known - depth))]
    bottleneck = depth >= 50
    side = max(1, image // 4)
    stem_side = max(1, image // 2)
    runs: list[tuple[Block, int]] = [
        (_convolutions("stem", [(in_channels * 49, width, stem_side)], width), 1)
    ]
    channels = width
    for index, count in enumerate(stages):
        inner = width * 2**index
        outer = inner * (4 if bottleneck else 1)
        if index:
            side = max(1, side // 2)
        for number in range(count):
            runs.append(
                (_residual(channels if number == 0 else outer, inner, outer, side, bottleneck), 1)
            )
        channels = outer
    head = Block(
        "head",
        (Matmul("head", channels, num_classes, "none", bias=True),),
        Saved(sequence=float(channels)),
        num_classes,
    )
    runs.append((head, 1))
    return Model(
        f"resnet{depth}",
        tuple(_merge(runs)),
        seq_len=1,
        hidden=width,
        sizes={"num_local_experts": 0},
    )


def _merge(runs: list[tuple[Block, int]]) -> list[tuple[Block, int]]:
    merged: list[tuple[Block, int]] = []
    for block, count in runs:
        if merged and merged[-1][0] == block:
            merged[-1] = (block, merged[-1][1] + count)
        else:
            merged.append((block, count))
    return merged


def _residual(inputs: int, inner: int, outer: int, side: int, bottleneck: bool) -> Block:
    if bottleneck:
        shapes = [(inputs, inner, side), (inner * 9, inner, side), (inner, outer, side)]
    else:
        shapes = [(inputs * 9, inner, side), (inner * 9, outer, side)]
    if inputs != outer:
        shapes.append((inputs, outer, side))
    return _convolutions("residual", shapes, outer)


def _convolutions(name: str, shapes: list[tuple[int, int, int]], width: int) -> Block:
    """Convolutions (inputs times kernel, outputs, side), each with a batch norm and an
    activation.
    """
    operations: list[Operation] = []
    saved = 0.0
    side = shapes[-1][2]
    for index, (inputs, outputs, pixels) in enumerate(shapes):
        area = float(pixels * pixels)
        operations.append(
            Matmul(f"{name}{index}", inputs, outputs, "none", rows=area, convolution=True)
        )
        operations.append(
            Elementwise(f"norm{index}", 2 * area * outputs, 2 * area * outputs, "none", 2 * outputs)
        )
        saved += 2.0 * area * outputs  # the input of the norm and the input of the next convolution
    return Block(name, tuple(operations), Saved(sequence=saved), width * side * side)
