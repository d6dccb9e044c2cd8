"""Objects are finished when their constructor returns.

A mutable dataclass may be filled by its holder. An object with behaviour may not have an attribute
assigned from outside its own methods: it gets a constructor argument, a method with a name of what
it does, or a context manager. So a reader of a class sees every way in which it changes.
"""

from __future__ import annotations

import pytest

from tests.architecture.receivers import Assignment, assignments, known
from tests.architecture.source import module

# Attributes that torch itself has its users set on parameters, modules and tensors.
OF_TORCH = {
    *("data", "grad", "forward", "training", "weight", "reset_parameters", "__class__"),
    *("_parameters", "_modules", "_forward_pre_hooks", "dropout"),
}
# Classes of other libraries that keep what they are given, or are told what to do by it.
FOREIGN = {
    "AutogradContext": "a function of autograd keeps there what its backward needs",
    "BatchSampler": "torch's loaders are shuffled by another sampler",
    "CallbackHandler": "the library's own loop fills it so",
    "DataLoader": "the library marks its loaders so",
    "Namespace": "the options of a command are its attributes",
    "Optimizer": "schedulers of torch look for the mark, Muon shares the state of its parts",
}
# What else no annotation names: each is an object of another library, a module or a function.
NAMED = {
    "checkpoint.behind": "the attributes of threads and of weakref.finalize",
    "checkpoint.elsewhere": "the module that torch.load is given as pickle",
    "comm.shm.process_group": "the options of a call of torch.distributed",
    "comm.shm.semaphores": "functions of ctypes are told their arguments so",
    "datasets.tokenizer": "the length of a tokenizer of transformers",
    "engine.compiling": "what a module of the user computed before it was compiled",
    "engine.fused_layers": "marks of torch's encoder layers",
    "engine.update": "the scale that a fused kernel of torch takes",
    "explain.notebook": "notes of a dataclass, in a list that a method makes",
    "imports": "the loader of a module's spec, which Python reads there",
    "launcher.by_value": "the file of a module that is made here",
    "launcher.host_memory": "the time that http.server waits",
    "launcher.lean": "the mark by which torch leaves a function untraced",
    "loops.batches": "the generator of torch's sampler",
    "loops.lightning": "the trainer of Lightning",
    "loops.trl": "the arguments of TRL",
    "models.adapter_files": "the files of the user's own module",
    "models.adapters": "submodules of the user's own module",
    "models.expert_adapters": "experts of the user's own model",
    "models.hf": "the config of transformers",
    "models.hf_experts": "the config of transformers",
    "models.hf_masks": "a function of transformers, which looks at positions",
    "models.packed_experts": "the config of transformers",
    "parallel.expert.split": "the wrapper of PEFT around experts",
    "parallel.tensor.adapters": "the submodule of a linear layer",
    "parallel.tensor.apply": "the width that a module of transformers splits by",
    "predict.cost.cached_hash": "a class that is decorated",
    "predict.planner.choose": "what a search found, a dataclass",
    "run.ending": "the attribute of a thread",
    "run.optimizers": "a function that is decorated",
    "torch_internals": "functions of torch that checkpoint calls",
    "verify.outside.deepspeed": "the map of DeepSpeed",
    "verify.reference.copied": "the defaults of a function that is copied",
}


def is_wrong(one: Assignment) -> bool:
    """Whether an object is changed from outside its own methods."""
    if one.receiver in {"self", "cls"} or one.attribute in OF_TORCH:
        return False
    facts = known().classes.get(one.of_class)
    if facts is None:
        return one.of_class not in FOREIGN and _room(one) not in NAMED
    if one.of_class in set(known().lineage(one.inside)):
        return False
    return not facts.is_mutable_dataclass or one.is_through_another


def _room(one: Assignment) -> str:
    return module(one.path).removeprefix("plait.")


def test_nothing_is_assigned_from_outside() -> None:
    wrong = [
        f"{module(one.path)}:{one.line}: {one.receiver}.{one.attribute} "
        f"of {one.of_class or 'a class that no annotation names'}"
        for one in assignments()
        if is_wrong(one)
    ]
    assert not wrong, "give the class a constructor argument or a method:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", NAMED)
def test_an_exception_is_still_needed(name: str) -> None:
    of_room = [one for one in assignments() if _room(one) == name]
    assert any(one.of_class not in known().classes for one in of_room)
