"""`cuda_graphs`: all that a step computes before its update, as one graph that one call launches.

A GPU that trains a small model waits for the host, which launches each kernel by itself. A CUDA
graph has the kernels of a step's forwards and backwards, with the addresses that they read and
write. The update stays outside, since it follows numbers of the host: learning rate, clipping, and
whether the step counts. So of all that changes from step to step a graph sees the batch alone.
That is copied to where the graph reads it.

    warm-up   a step of new shapes computes as ever, in the stream of the graphs
    capture   it computes for the recorder, and what it leaves on the host is kept
    replay    batch -> inputs of the graph, launch, what capture left on the host

Source: NVIDIA, CUDA C++ Programming Guide, section "CUDA Graphs".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from plait.batch_trees import SampleList, leaves_of, map_tensors, structure_of, tensors_of
from plait.engine.options import Options
from plait.engine.stages.pipeline import Pipeline, PipelineStep, index_of
from plait.errors import NotAvailable
from plait.parallel.data import DataStrategy, ReplicatedParameters
from plait.parallel.pipeline.actions import Action, Kind
from plait.parallel.pipeline.runtime import Handler
from plait.plan import Plan
from plait.values import PyTree

WARM_UP_STEPS: Final = 3
"""Steps of new shapes before their graph: libraries choose kernels there, and blocks compile."""
MOST_GRAPHS: Final = 4
"""Graphs of one engine. Batches of further shapes are computed without."""

Handlers: TypeAlias = Mapping[Kind, Handler]
Launch: TypeAlias = Callable[[], None]


class StepRecorder(Protocol):
    """Makes graphs of one device."""

    def beside(self) -> AbstractContextManager[None]:
        """A context whose work comes between what was queued before and what is queued after."""

    def record(self, work: Callable[[], None]) -> Launch:
        """Have `work` queue its kernels into a graph; a function that launches them. Called within
        `beside`.
        """


class GpuRecorder:
    """Records graphs of one GPU, in one stream and one pool of memory.

    Warm-up has the same stream: libraries keep workspaces and autograd its nodes by stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """The stream of the graphs, which waits for the current one, and that waits for it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Launch:
        """A graph of `work`. Threads that copy or load beside it are not disturbed."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        return graph.replay


def check_trains() -> None:
    """Raise `NotAvailable` where graphs are asked for and there is no GPU."""
    if not torch.cuda.is_available():
        raise NotAvailable(
            "train.cuda_graphs records the kernels of an NVIDIA GPU, and there is none here; leave "
            "it out: losses are the same without"
        )


def recorder_of(device: torch.device) -> StepRecorder:
    """The recorder of a device. Raises `NotAvailable` for one that is no GPU."""
    if device.type != "cuda":
        raise NotAvailable(
            f"cuda_graphs records the kernels of a GPU, and this rank computes on '{device}'; "
            "leave it out"
        )
    return GpuRecorder(device)


@dataclass(frozen=True)
class StepGraph:
    """The graph of steps of one shape: where it reads the batch, and what it leaves on the host."""

    inputs: Sequence[Tensor]
    launch: Launch
    restore: Callable[[], None]

    def replay(self, step: PipelineStep) -> None:
        """Compute another batch, whose tensors have the shapes of the recorded one."""
        torch._foreach_copy_(list(self.inputs), _read_of(step))
        self.launch()
        self.restore()


def make(
    model: nn.Module, pipeline: Pipeline, strategy: DataStrategy, plan: Plan, options: Options
) -> StepGraphs | None:
    """The graphs of an engine; None where they are not asked for, or its plan has none.

    Raises `NotAvailable` where they are asked for and the device is no GPU.
    """
    if not options.cuda_graphs:
        return None
    recorder = recorder_of(strategy.group.device)
    reason = _why_not(plan, options)
    if reason is None and (pipeline.has_contexts or not isinstance(strategy, ReplicatedParameters)):
        reason = "routers and codes are read between kernels"
    if reason is None:
        return StepGraphs(model, pipeline, strategy, recorder)
    tell(reason)
    return None


def _why_not(plan: Plan, options: Options) -> str | None:
    """Why steps of a plan are not recorded; None where they are."""
    reasons = {
        f"plan '{plan}' has {plan.world_size} ranks, and a graph is of one": plan.world_size > 1,
        f"{plan.dp} keeps its optimizer in host memory": plan.dp.offload,
        "offload_activations moves what blocks keep between kernels": options.offload_activations,
        "float16 has a scale of the loss that changes": options.float16,
        "fixed_order adds gradients in a tree of the host's": options.fixed_order,
        "aggregate = 'mean' reads the count of targets": options.aggregate == "mean",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class StepGraphs:
    """The graphs of one engine, by the shapes of the batch and the places of the parameters.

    Attributes:
        refusal: why no step is recorded any more; None while steps are.
        num_replays: steps that were computed by a graph.
    """

    def __init__(
        self, model: nn.Module, pipeline: Pipeline, strategy: DataStrategy, recorder: StepRecorder
    ) -> None:
        self.refusal: str | None = None
        self.num_replays = 0
        self._model = model
        self._pipeline = pipeline
        self._strategy = strategy
        self._recorder = recorder
        self._graphs: dict[object, StepGraph] = {}
        self._warm_up: dict[object, int] = {}

    def beside(self) -> AbstractContextManager[None]:
        """The context of all actions before an update, recorded or not."""
        return nullcontext() if self.refusal else self._recorder.beside()

    def handlers(self, step: PipelineStep, actions: Sequence[Action], plain: Handlers) -> Handlers:
        """The handlers of a step's actions before its update: `plain`, or those of a replay."""
        if self.refusal is not None:
            return plain
        key = self._key(step)
        graph = self._graphs.get(key)
        if graph is None:
            done = self._warm_up.get(key, 0)
            if done < WARM_UP_STEPS:
                self._warm_up[key] = done + 1
                return self._watched(plain)
            if len(self._graphs) == MOST_GRAPHS:
                return plain
            graph = self._record(step, actions, plain)
            if graph is None:
                return plain
            self._graphs[key] = graph
        return self._replaying(graph, step, plain)

    def _replaying(self, graph: StepGraph, step: PipelineStep, plain: Handlers) -> Handlers:
        """The first forward launches everything; the actions after it are done by then."""

        def forward(action: Action) -> None:
            if index_of(action) == 0:
                graph.replay(step)
                self.num_replays += 1

        done: Handlers = dict.fromkeys(plain, _nothing)
        return {**done, Kind.UNSHARD: plain[Kind.UNSHARD], Kind.FORWARD: forward}

    def _watched(self, plain: Handlers) -> Handlers:
        """Handlers that see whether a layer draws random numbers, whose seed is the host's."""

        def watched(action: Action) -> None:
            plain[action.kind](action)
            if self._pipeline.has_drawn:
                self.refuse(
                    "layers draw random numbers (dropout), from a seed that the host sets for each "
                    "micro-batch"
                )

        return {**plain, Kind.FORWARD: watched, Kind.BACKWARD: watched}

    def _record(
        self, step: PipelineStep, actions: Sequence[Action], plain: Handlers
    ) -> StepGraph | None:
        """The graph of a step; None where it cannot be recorded, and must be computed."""
        fixed = _fixed(step)

        def work() -> None:
            self._pipeline.begin(fixed)
            for action in actions:
                if action.kind is not Kind.UNSHARD and action.kind in plain:
                    plain[action.kind](action)

        for action in actions:
            if action.kind is Kind.UNSHARD:
                plain[action.kind](action)
        try:
            with self._pipeline.unseeded():
                launch = self._recorder.record(work)
        except Exception as error:  # a computation of the user's may do what no graph can
            self.refuse(f"the step cannot be recorded ({_origin(error)})")
            self._pipeline.begin(step)
            return None
        return StepGraph(_read_of(fixed), launch, self._left_on_host())

    def _left_on_host(self) -> Callable[[], None]:
        """A function that brings back what the actions have left on the host by now."""
        loss = self._pipeline.loss.kept()
        states = [(state, state.progress()) for state in self._strategy.states]
        slots = [slot for state in self._strategy.states for slot in state.bucket.slots]
        grads = [(slot.param, slot.param.grad) for slot in slots]

        def restore() -> None:
            loss()
            for state, progress in states:
                state.take_progress(progress)
            for param, grad in grads:
                param.grad = grad

        return restore

    def refuse(self, reason: str) -> None:
        """Record no step from here on, and say why."""
        if self.refusal is None:
            self.refusal = reason
            self._graphs.clear()
            tell(reason)

    def _key(self, step: PipelineStep) -> object:
        """All that a graph has and a step may change: shapes, sizes, and where parameters lie."""
        micros = step.micro_batches.values()
        pairs = [(micro.inputs, micro.targets) for micro in micros]
        sizes = (replace(micro, inputs=None, targets=None) for micro in micros)
        params = ((one.data_ptr(), one.requires_grad) for one in self._model.parameters())
        buffers = (one.data_ptr() for one in self._model.buffers())
        return *_described([*pairs, step.loss_divisor]), *sizes, *params, *buffers


def tell(reason: str) -> None:
    """Warn that steps are computed without graphs."""
    warnings.warn(f"cuda_graphs: {reason}; steps run without graphs", stacklevel=3)


def _origin(error: BaseException) -> str:
    """The first line of the first error: a recording that has failed fails to end, too."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _described(tree: PyTree) -> list[object]:
    """The structure of batches, shapes and precisions of their tensors, and all that is none."""
    described: list[object] = [structure_of(tree)]
    for leaf in leaves_of(tree):
        if isinstance(leaf, SampleList):
            described += _described(list(leaf))
        else:
            described.append((*leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf))
    return described


def _fixed(step: PipelineStep) -> PipelineStep:
    """The step on copies of its tensors, which stay where they are."""
    micros = {
        number: replace(
            micro,
            inputs=map_tensors(torch.clone, micro.inputs),
            targets=map_tensors(torch.clone, micro.targets),
        )
        for number, micro in step.micro_batches.items()
    }
    divisor = map_tensors(torch.clone, step.loss_divisor)
    return replace(step, micro_batches=micros, loss_divisor=divisor)


def _read_of(step: PipelineStep) -> list[Tensor]:
    """The tensors of a step that its kernels read."""
    return tensors_of([*step.pairs(), step.loss_divisor])


def _nothing(action: Action) -> None:
    pass
