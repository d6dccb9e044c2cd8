"""Tensor parallelism by DTensor: styles, layouts, losses and operators on split classes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from atlas.features import models
from atlas.features.feature import Feature
from atlas.features.models import CLASSES, WIDTH, adamw, make, of_all

PACKAGE = "torch"
TITLE = "torch DTensor"


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def layers(model):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh(), plan)
    return model, adamw(model, foreach=False)


def layers_foreach(model):
    layers(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def in_sequence(model):
    """Norms and residuals on parts of the sequence."""
    parts = Shard(1)
    plan = {
        "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=parts),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=parts, output_layouts=Replicate()),
    }
    for number in range(2):
        block = f"blocks.{number}"
        plan[f"{block}.norm"] = SequenceParallel()
        plan[f"{block}.up"] = ColwiseParallel(input_layouts=parts)
        plan[f"{block}.down"] = RowwiseParallel(output_layouts=parts)
    parallelize_module(model, mesh(), plan)
    return model, adamw(model, foreach=False)


def in_sequence_prepared(model):
    """As above; the inputs of blocks are gathered by PrepareModuleInput."""
    parts, whole = Shard(1), Replicate()
    plan = {"table": RowwiseParallel(input_layouts=whole, output_layouts=whole)}
    for number in range(2):
        block = f"blocks.{number}"
        plan[block] = PrepareModuleInputOutput(
            input_layouts=(whole,),
            desired_input_layouts=(parts,),
            output_layouts=parts,
            desired_output_layouts=whole,
        )
        plan[f"{block}.norm"] = SequenceParallel()
        plan[f"{block}.up"] = ColwiseParallel(input_layouts=parts)
        plan[f"{block}.down"] = RowwiseParallel(output_layouts=parts, use_local_output=False)
    parallelize_module(model, mesh(), plan)
    return model, adamw(model, foreach=False)


def prepared(model):
    """The input of a layer is cut by rows, its output gathered."""
    plan = {
        "blocks.0": PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),)
        ),
        "blocks.1": PrepareModuleOutput(
            output_layouts=Shard(0), desired_output_layouts=Replicate()
        ),
    }
    distribute_module(model, mesh())
    parallelize_module(model, mesh(), plan)
    return model, adamw(model, foreach=False)


def vocabulary(model):
    plan = {"table": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(model, mesh(), plan)
    return model, adamw(model, foreach=False)


def columns_of_the_table(model):
    plan = {"table": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh(), plan)
    return model, adamw(model, foreach=False)


def tied(model):
    """The table's rows are the head's: both are split by classes."""
    plan = {
        "table": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh(), plan)
    return model, adamw(model, foreach=False)


def tied_again(model):
    """As the documentation of models says: tied once more after the split."""
    tied(model)
    model.head.weight = model.table.weight
    return model, adamw(model, foreach=False)


def replicated(model):
    distribute_module(model, mesh())
    return model, adamw(model, foreach=False)


def sharded_layers(model):
    """Tensor parallelism in pairs, FSDP2 over the pairs."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, grid["tp"], plan)
        fully_shard(block, mesh=grid["dp"])
    fully_shard(model, mesh=grid["dp"])
    return model, adamw(model, foreach=False), grid["dp"]


def of_rows(state, batch, loss):
    model, optimizer, lines = state
    own = [part.chunk(2)[lines.get_local_rank()] for part in batch]
    models.of_all((model, optimizer), own, loss)


class Head(nn.Module):
    """A layer whose classes are split, and a tail that works on them as a DTensor."""

    def __init__(self, classes=CLASSES):
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def head_of(classes=CLASSES, targets=None, samples=8):
    def make_head(loss):
        def made():
            torch.manual_seed(0)
            batches = []
            for _ in range(2):
                wanted = torch.randint(0, classes, (samples,))
                batches.append((torch.randn(samples, WIDTH), (targets or _same)(wanted, classes)))
            return Head(classes), batches, loss

        return made

    return make_head


def _same(wanted, classes):
    return wanted


def _soft(wanted, classes):
    return torch.randn(len(wanted), classes).softmax(1)


def _masked(wanted, classes):
    return wanted.masked_fill(torch.arange(len(wanted)) % 3 == 0, -100)


def split_classes(model):
    style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh(), {"head": style})
    return model, adamw(model, foreach=False)


def in_loss_parallel(state, batch, loss):
    model, optimizer = state
    with loss_parallel():
        loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


def plainly(state, batch, loss):
    """The loss on a DTensor, without loss_parallel."""
    model, optimizer = state
    value = loss(model(batch[0]), batch[1])
    value.backward()
    optimizer.step()
    optimizer.zero_grad()


def like(logits, value):
    """A plain tensor as the logits are laid out."""
    if isinstance(logits, DTensor):
        return distribute_tensor(value, logits.device_mesh, logits.placements)
    return value


def weighted(logits, targets):
    weight = torch.arange(1, CLASSES + 1, dtype=logits.dtype)
    if isinstance(logits, DTensor):
        weight = distribute_tensor(weight, logits.device_mesh, [Replicate()])
    return F.cross_entropy(logits, targets, weight=weight)


def summed(logits, targets):
    return F.cross_entropy(logits, targets, reduction="sum")


def unreduced(logits, targets):
    return F.cross_entropy(logits, targets, reduction="none").mean()


def smoothed(logits, targets):
    return F.cross_entropy(logits, targets, label_smoothing=0.1)


def squares(logits, targets):
    return F.mse_loss(logits, like(logits, targets))


def divergence(logits, targets):
    return F.kl_div(F.log_softmax(logits, 1), like(logits, targets), reduction="batchmean")


def with_z_loss(logits, targets):
    return F.cross_entropy(logits, targets) + 0.1 * torch.logsumexp(logits, 1).square().mean()


def tail(function):
    """A mean over samples of a function of the logits."""

    def loss(logits, targets):
        return function(logits).mean()

    return loss


def _selected(x):
    index = torch.tensor([3, 0, 3])
    if isinstance(x, DTensor):
        index = distribute_tensor(index, x.device_mesh, [Replicate()])
    return x.index_select(1, index)


def _gathered(x):
    index = torch.tensor([[3, 0, 5]]).repeat(len(x), 1)
    if isinstance(x, DTensor):
        index = distribute_tensor(index, x.device_mesh, [Replicate()])
    return x.gather(1, index)


def _argmax(x):
    return x.argmax(1)


def _whole(x):
    return x.redistribute(placements=[Replicate()]) if isinstance(x, DTensor) else x


def _partial(x):
    """Sums over the own classes, redistributed in the middle."""
    if not isinstance(x, DTensor):
        return x.square().sum(1)
    own = DTensor.from_local(x.to_local().square().sum(1), x.device_mesh, [Partial()])
    return own.redistribute(placements=[Replicate()])


TAILS = {
    "softmax": lambda x: x.softmax(1).square().sum(1),
    "log_softmax": lambda x: x.log_softmax(1).square().sum(1),
    "logsumexp": lambda x: torch.logsumexp(x, 1),
    "max": lambda x: x.amax(1),
    "max with indices": lambda x: x.max(1).values,
    "min": lambda x: x.amin(1),
    "2-norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "1-norm": lambda x: torch.linalg.vector_norm(x, ord=1, dim=1),
    "infinity norm": lambda x: torch.linalg.vector_norm(x, ord=float("inf"), dim=1),
    "4-norm": lambda x: torch.linalg.vector_norm(x, ord=4, dim=1),
    "normalize": lambda x: F.normalize(x, dim=1)[:, 0],
    "mean": lambda x: x.mean(1).square(),
    "variance": lambda x: x.var(1),
    "standard deviation": lambda x: x.std(1),
    "layer_norm": lambda x: F.layer_norm(x, (x.shape[-1],)).pow(3).sum(1),
    "rms_norm": lambda x: F.rms_norm(x, (x.shape[-1],)).pow(3).sum(1),
    "cumsum": lambda x: x.cumsum(1).square().sum(1),
    "product": lambda x: x.prod(1),
    "sort": lambda x: (x.sort(1).values * x.sort(1).values.detach()).sum(1),
    "topk": lambda x: x.topk(2, 1).values.sum(1),
    "flip": lambda x: (x.flip(1) * x).sum(1),
    "roll": lambda x: (x.roll(1, 1) * x).sum(1),
    "slice": lambda x: x[:, 1:4].square().sum(1),
    "select": lambda x: x[:, 4].square(),
    "split": lambda x: x.split([1, x.shape[1] - 1], 1)[1].square().sum(1),
    "chunk": lambda x: x.chunk(2, 1)[1].square().sum(1),
    "unbind": lambda x: x.unbind(1)[3].square(),
    "cat": lambda x: torch.cat([x, 2 * x], 1).square().sum(1),
    "stack": lambda x: torch.stack([x, 2 * x], 2).square().sum((1, 2)),
    "pad": lambda x: F.pad(x, (1, 2)).square().sum(1),
    "view": lambda x: x.unflatten(1, (2, -1)).square().sum((1, 2)),
    "flatten": lambda x: x.unflatten(1, (2, -1)).flatten(1).square().sum(1),
    "repeat": lambda x: x.repeat(1, 2).square().sum(1),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 3, -1).square().sum((1, 2)),
    "triangle": lambda x: x.tril().square().sum(1),
    "outer product": lambda x: (x.t() @ x).square().sum().expand(8),
    "glu": lambda x: F.glu(x, 1).square().sum(1),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x).square().sum(1),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.5).square().sum(1),
    "clamp": lambda x: x.clamp(-0.1, 0.2).square().sum(1),
    "index_select": lambda x: _selected(x).square().sum(1),
    "gather": lambda x: _gathered(x).square().sum(1),
    "argmax": lambda x: (x * F.one_hot(_argmax(x), x.shape[1])).sum(1),
    "einsum": lambda x: torch.einsum("bi,bi->b", x, x),
    "add in place": lambda x: (x * 1.0).add_(1.0).square().sum(1),
    "redistribute": lambda x: _whole(x).square().sum(1),
    "partial sums": _partial,
}


FEATURES = [
    Feature("ColwiseParallel, RowwiseParallel", make, layers, of_all),
    Feature("foreach optimizer beside plain tensors", make, layers_foreach, of_all, expected=""),
    Feature("SequenceParallel", models.make_tokens, in_sequence, of_all),
    Feature("PrepareModuleInputOutput", models.make_tokens, in_sequence_prepared, of_all),
    Feature("PrepareModuleInput, PrepareModuleOutput", make, prepared, of_all, expected=""),
    Feature("a table split by rows", models.make_tokens, vocabulary, of_all),
    Feature("a table split by columns", models.make_tokens, columns_of_the_table, of_all),
    Feature("tied weights, split once each", models.make_tied, tied, of_all, expected=""),
    Feature("tied weights, tied again", models.make_tied, tied_again, of_all, expected=""),
    Feature("distribute_module", make, replicated, of_all, expected=""),
    Feature("FSDP2 over tensor parallelism", make, sharded_layers, of_rows, 4),
    Feature("loss_parallel", head_of()(F.cross_entropy), split_classes, in_loss_parallel),
    Feature(
        "loss_parallel, 5 classes on 2 ranks",
        head_of(5)(F.cross_entropy),
        split_classes,
        in_loss_parallel,
    ),
    Feature(
        "loss_parallel, masked targets",
        head_of(targets=_masked)(F.cross_entropy),
        split_classes,
        in_loss_parallel,
    ),
    Feature("loss_parallel, weights", head_of()(weighted), split_classes, in_loss_parallel),
    Feature("loss_parallel, sum", head_of()(summed), split_classes, in_loss_parallel),
    Feature("loss_parallel, no reduction", head_of()(unreduced), split_classes, in_loss_parallel),
    Feature(
        "loss_parallel, label smoothing",
        head_of()(smoothed),
        split_classes,
        in_loss_parallel,
        expected="",
    ),
    Feature(
        "loss_parallel, z loss",
        head_of()(with_z_loss),
        split_classes,
        in_loss_parallel,
        expected="",
    ),
    *(
        Feature(f"{name} of split classes, plain", head_of(5, wanted)(loss), split_classes, plainly)
        for name, loss, wanted in (
            ("cross_entropy", F.cross_entropy, None),
            ("masked cross_entropy", F.cross_entropy, _masked),
            ("label smoothing", smoothed, None),
            ("mse_loss", squares, _soft),
            ("kl_div", divergence, _soft),
            ("z loss", with_z_loss, None),
        )
    ),
    *(
        Feature(f"{name} over split classes", head_of()(tail(one)), split_classes, plainly)
        for name, one in TAILS.items()
    ),
]
