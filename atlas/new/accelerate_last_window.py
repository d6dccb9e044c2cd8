"""accelerate 1.15.0 makes the last update of an epoch too small, where its window is short.

Seen on two ranks with torch 2.13 on a CPU, without plait. `backward` divides the loss by
`gradient_accumulation_steps`, also in a last window of fewer micro-batches, after which
`accumulate` updates all the same. With one micro-batch in a window of three the gradient is a third
of what it should be.

    python -m torch.distributed.run --nproc_per_node 2 THIS_FILE
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

STEPS = 3
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
torch.manual_seed(0)
model = torch.nn.Linear(8, 5)
inputs, targets = torch.randn(16, 8), torch.randint(0, 5, (16,))
F.cross_entropy(model(inputs[12:]), targets[12:]).backward()
right = model.weight.grad.norm()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the model stays as it is
optimizer.zero_grad()
loader = DataLoader(TensorDataset(inputs, targets), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for number, (x, y) in enumerate(loader):  # four micro-batches a rank: windows of three and one
    with accelerator.accumulate(model):
        accelerator.backward(F.cross_entropy(model(x), y))
        if accelerator.sync_gradients and number == STEPS and accelerator.is_main_process:
            found = model.module.weight.grad.norm()
            texts = [f"gradient's norm {float(found):.6f}", f"right {float(right):.6f}"]
            print(f"last window: {', '.join(texts)}, ratio {float(right / found):.3f}", flush=True)
        optimizer.step()
        optimizer.zero_grad()
