"""A stream of `datasets`, whose state is saved and loaded twice, as a trainer does that resumes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

LEGS = 3
SAMPLES = 2  # of each rank in one leg, which makes one update


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def stream(num_samples):
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    whole = Dataset.from_dict({"index": list(range(num_samples))}).to_iterable_dataset(num_shards=2)
    return split_dataset_by_node(whole, dist.get_rank(), dist.get_world_size())


def train(model, batches, loss, resumed):
    inputs, targets = (torch.cat(part) for part in zip(*batches, strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = None
    for leg in range(LEGS):
        data = resumed(stream(len(inputs)), leg, saved)
        rows = [row["index"] for row, _ in zip(data, range(SAMPLES))]  # noqa: B905 - it stops there
        saved = data.state_dict()
        loss(model(inputs[rows]), targets[rows]).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()


def broken(model, batches, loss):
    def by_its_state(data, leg, saved):
        if saved is not None:
            data.load_state_dict(saved)
        return data

    train(model, batches, loss, by_its_state)


def fixed(model, batches, loss):
    def by_a_count_of_its_own(data, leg, saved):
        return data.skip(leg * SAMPLES)

    train(model, batches, loss, by_a_count_of_its_own)
