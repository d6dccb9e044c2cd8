"""Two stages that share a table, on two data ranks each, whose gradients are scattered first."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

DATA = STAGES = 2


class Net(torch.nn.Module):
    """A table of tokens, a layer, and a head with the table's weight."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(6, 8)
        self.body = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.table(tokens))))


class Place:
    """This rank's stage and data rank, with the groups that it is in."""

    def __init__(self):
        self.stage, self.data = divmod(dist.get_rank(), DATA)
        for stage in range(STAGES):
            group = dist.new_group([stage * DATA + data for data in range(DATA)])
            self.of_stage = group if stage == self.stage else getattr(self, "of_stage", None)
        for data in range(DATA):
            group = dist.new_group([stage * DATA + data for stage in range(STAGES)])
            self.of_data = group if data == self.data else getattr(self, "of_data", None)


def make():
    torch.manual_seed(0)
    batches = [(torch.randint(0, 6, (8,)), torch.randint(0, 6, (8,))) for _ in range(2)]
    return Net(), batches, F.cross_entropy


def prepare(model):
    place = Place()
    own = [model.table.weight]
    if place.stage == 0:
        own += model.body.parameters()
    return model, place, own, torch.optim.SGD(own, lr=0.1)


def passes(model, place, batch, loss):
    """A forward and a backward; the second stage has the loss."""
    inputs, targets = (part.chunk(DATA)[place.data] for part in batch)
    other = (1 - place.stage) * DATA + place.data
    if place.stage == 0:
        hidden = torch.tanh(model.body(model.table(inputs)))
        dist.send(hidden.detach(), other)
        grad = torch.empty_like(hidden)
        dist.recv(grad, other)
        hidden.backward(grad)
    else:
        hidden = torch.empty(len(inputs), 8, dtype=model.head.weight.dtype)
        dist.recv(hidden, other)
        hidden.requires_grad_()
        loss(model.head(hidden), targets).backward()
        dist.send(hidden.grad, other)


def buffer_of(own):
    """Gradients one behind the other, each a view, as long as all data ranks' parts."""
    total = sum(one.numel() for one in own)
    buffer = torch.zeros(total + -total % DATA, dtype=own[0].dtype)
    begin = 0
    for one in own:
        view = buffer[begin : begin + one.numel()].view_as(one)
        view.copy_(one.grad)
        one.grad = view
        begin += one.numel()
    return buffer


def scatter(buffer, place):
    """The own part becomes the mean over data ranks; the rest stays what this rank computed."""
    whole = buffer.clone()
    dist.all_reduce(whole, group=place.of_stage)
    own = buffer.chunk(DATA)[place.data]
    own.copy_(whole.chunk(DATA)[place.data] / DATA)


def gather(buffer, place):
    """Every data rank's own part, as each updates its own and sends it."""
    parts = [torch.empty_like(buffer.chunk(DATA)[0]) for _ in range(DATA)]
    own = buffer.chunk(DATA)[place.data].clone()
    dist.all_gather(parts, own, group=place.of_stage)
    buffer.copy_(torch.cat(parts))


def update(state, batch, loss, scattered_first):
    model, place, own, optimizer = state
    optimizer.zero_grad()
    passes(model, place, batch, loss)
    ordered = own if place.stage == 0 else own[::-1]
    buffer = buffer_of(ordered)
    if scattered_first:
        scatter(buffer, place)
        dist.all_reduce(model.table.weight.grad, group=place.of_data)
    else:
        dist.all_reduce(model.table.weight.grad, group=place.of_data)
        scatter(buffer, place)
    gather(buffer, place)
    optimizer.step()


def broken(state, batch, loss):
    update(state, batch, loss, scattered_first=True)


def fixed(state, batch, loss):
    update(state, batch, loss, scattered_first=False)
