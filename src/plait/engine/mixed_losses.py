"""Sees whether a loss compares the samples of a batch with each other, or with their statistics.

Contrastive losses make pairs of samples. Others divide by a mean or a deviation over the batch. A
plan that divides the batch gives such a loss fewer pairs and other statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Final

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.engine.chosen_samples import (
    OwnPlaces,
    einsum_mixes,
    selects_by_a_mask,
    stacks_first,
    takes_a_statistic,
    takes_one,
    takes_several,
)
from plait.engine.loss_follower import CURVED, LIMITS, LossFollower, TorchCall
from plait.engine.norms import is_root, is_square, order_of_norm
from plait.values import PyTree

PRODUCTS: Final = frozenset({"matmul", "rmatmul", "mm", "linear", "inner", "cdist"})
TURNED_PRODUCTS: Final = frozenset({"linear", "inner", "cdist"})
"""Products with the transpose of the second factor."""

BETWEEN: Final = frozenset(
    {
        *("add", "radd", "sub", "rsub", "mul", "rmul", "div", "truediv", "true_divide", "divide"),
        *("eq", "ne", "lt", "le", "gt", "ge", "multiply", "subtract", "isub", "itruediv", "idiv"),
        *("cosine_similarity", "pairwise_distance", "logical_and", "logical_or", "and", "or"),
    }
)
"""Functions of numbers side by side."""

STATISTICS: Final = frozenset({"mean", "nanmean", "std", "var", "std_mean", "var_mean", "sum"})

ALONG: Final = frozenset(
    {
        *("softmax", "log_softmax", "logcumsumexp", "cumsum", "cumprod", "sort", "argsort"),
        *("std", "var", "std_mean", "var_mean", "logsumexp", "softmin", "cummax", "cummin"),
        *("topk", "kthvalue", "mode", "msort", "median", "nanmedian", "quantile", "nanquantile"),
        *("argmax", "argmin", "normalize", "norm", "linalg_norm", "linalg_vector_norm"),
    }
)
"""Functions along a dim whose results are no sums of a number of each place."""

EXTREMES: Final = frozenset({"max", "min", "amax", "amin"})

DIM_IS_THIRD: Final = frozenset(
    {
        *("topk", "kthvalue", "quantile", "nanquantile"),
        *("normalize", "norm", "linalg_norm", "linalg_vector_norm"),
    }
)
"""Functions whose second argument is how many, or which part."""

OF_LAST_DIM: Final = frozenset({"topk", "kthvalue", "mode", "sort", "argsort"})
"""Functions along the last dim where none is given."""

OF_ALL_DIMS: Final = frozenset(
    {
        *("median", "nanmedian", "quantile", "nanquantile", "argmax", "argmin"),
        *("std", "var", "std_mean", "var_mean", *EXTREMES),
    }
)
"""Functions over all numbers where no dim is given."""

OF_A_GUESSED_DIM: Final = frozenset({"softmax", "log_softmax", "softmin"})
"""Functions that choose a dim by the number of dims where none is given."""

DIFFERENCES: Final = frozenset({"sub", "rsub", "subtract", "isub"})

LOGARITHMS: Final = ("LogBackward", "LogsumexpBackward")
"""Nodes of logarithms, to which a largest number is added that was subtracted before."""

ENTRIES: Final = frozenset({"getitem", "select", "unbind"})
"""Functions whose numbers are entries, such as the label of one sample."""

GUARDS: Final = frozenset({"isfinite", "isnan", "isinf"})
"""Functions that ask for a fault, which no loss should have."""

COMPARISONS: Final = frozenset({"lt", "le", "gt", "ge", "less", "greater"})

DIVISIONS: Final = frozenset({"div", "divide", "truediv", "true_divide", "itruediv", "idiv"})
INVERSES: Final = frozenset({"rdiv", "rtruediv", "reciprocal"})
"""Divisions by the first argument."""

PRODUCTS_OF_NUMBERS: Final = frozenset({"mul", "rmul", "imul", "multiply"})

BETWEEN_ALL: Final = frozenset({"cov", "corrcoef", "pdist"})
"""Functions whose results are of all pairs of samples, or of features over all samples."""

DEVIATIONS: Final = frozenset({"std", "var"})

NORMS: Final = frozenset(
    {"norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "dist"}
)

VIEWS: Final = frozenset({"view", "reshape", "flatten"})

TURNS: Final = frozenset({"t", "T", "mT", "transpose", "permute", "swapaxes", "movedim", "adjoint"})


class _Kind(Enum):
    SAMPLES = auto()
    """The first dim is that of samples."""
    TURNED = auto()
    """Another dim is that of samples, which was the first."""
    STATISTIC = auto()
    """Sums or means over all samples."""
    EXTREME = auto()
    """The largest or smallest number over all samples."""
    DEVIATION = auto()
    """The deviation or a norm of all targets, by which a mean over samples is not divided."""
    ROOT = auto()
    """The root of a sum or a mean over all samples, whose square is one again."""
    LOSS = auto()
    """A number over all samples that another function made, such as a loss."""


OF_ALL: Final = (_Kind.STATISTIC, _Kind.LOSS)


class MixedSamples(LossFollower[_Kind]):
    """Follows outputs and targets of a micro-batch [B, ...] through a loss.

    Numbers beside the loss, such as a correlation that is logged, may mix samples.
    """

    def __init__(self, output: PyTree, targets: PyTree) -> None:
        super().__init__()
        self._subtracts = False
        self._places = OwnPlaces()
        given = [one for one in tree_leaves((output, targets)) if isinstance(one, Tensor)]
        given = [one for one in given if not isinstance(one, nn.Parameter)]
        shaped = [one for one in given if one.dim() and not one.is_nested]
        rows = next((one.shape[0] for one in shaped if one.is_floating_point()), 0)
        for leaf in shaped:
            if rows > 1 and leaf.shape[0] == rows:
                self.known.add(leaf, _Kind.SAMPLES)

    def found(self, loss: PyTree) -> str:
        """The name of a function that mixes samples and that a loss was computed by, if any."""
        tensors = [leaf for leaf in tree_leaves(loss) if isinstance(leaf, Tensor)]
        if any(self.known.get(one) is _Kind.EXTREME and one.requires_grad for one in tensors):
            return "max or min"
        if any(self.known.get(one) is _Kind.ROOT and one.requires_grad for one in tensors):
            return "root or norm"
        return super().found(loss)

    def look_at_all(self, call: TorchCall[_Kind]) -> None:
        """Note places in the batch that the loss makes, and samples that are told by theirs."""
        if self._places.tell(call, call.of(_Kind.SAMPLES), call.of(_Kind.TURNED)):
            self.note_mixed(call.made, call.name)

    def look(self, call: TorchCall[_Kind]) -> None:
        """Note what a function makes of samples [B, ...], which it may mix."""
        if call.name in DIFFERENCES and call.of(_Kind.EXTREME):
            self._subtracts = True
        adds_again = self._subtracts and _is_added_to_a_logarithm(call)
        results = call.args[:1] if call.name == "setitem" else call.made
        if results and not adds_again and _mixes(call, results[0]):
            self.note_mixed(results, call.name)
            return
        for leaf in call.made:
            kind = _kind_of(call, leaf)
            if kind is not None and leaf not in self.known:
                self.known.add(leaf, kind)


def _kind_of(call: TorchCall[_Kind], made: Tensor) -> _Kind | None:
    """The kind of a result of tensors of given kinds; None where it is of one sample at most."""
    samples = call.of(_Kind.SAMPLES)
    of_all = _kind_of_one_number(call, made)
    if of_all is not None:
        return of_all
    if _is_statistic(call, made) or (call.name == "bincount" and samples):
        return _Kind.STATISTIC
    if call.name in EXTREMES and samples and _is_along_samples(call, samples[0]):
        return _Kind.EXTREME
    if call.name in GUARDS or not call.of(_Kind.SAMPLES, _Kind.TURNED):
        return None if call.name in GUARDS else call.kind
    if not made.dim():
        return None if call.name in ENTRIES else _Kind.LOSS
    return _kind_of_rows(call, made)


def _kind_of_one_number(call: TorchCall[_Kind], made: Tensor) -> _Kind | None:
    """The kind of a root or a deviation over all samples; None of other results."""
    if _is_root(call, made):
        return _Kind.ROOT
    if call.kind is _Kind.ROOT and is_square(call.name, call.args):
        return _Kind.LOSS
    if call.name in (*DEVIATIONS, *NORMS) and call.of(_Kind.SAMPLES) and not made.dim():
        return _Kind.LOSS if made.requires_grad else _Kind.DEVIATION
    return None


def _kind_of_rows(call: TorchCall[_Kind], made: Tensor) -> _Kind | None:
    """Which dim of a result [...] is that of samples, if any."""
    samples, turned = call.of(_Kind.SAMPLES), call.of(_Kind.TURNED)
    if samples and (takes_one(call) or stacks_first(call)):
        return None
    if len(samples) == 1 and _moves_first(call, samples[0], made):
        return _Kind.TURNED
    is_whole = bool(samples) and len(made) > 0 and len(made) % len(samples[0]) == 0
    if is_whole or selects_by_a_mask(call, samples) or (samples and takes_several(call, made)):
        return _Kind.SAMPLES
    if call.name in TURNS and turned:
        return _Kind.SAMPLES if made.dim() == 2 else None
    if turned and not samples and _is_turned(call, turned[0], made):
        return _Kind.TURNED
    return None


def _is_turned(call: TorchCall[_Kind], turned: Tensor, made: Tensor) -> bool:
    """Whether a result is as a turned tensor, or has a row of all samples for each of its first."""
    is_flat = call.name in VIEWS and made.dim() == 2 and made.shape[0] == turned.shape[0]
    return made.shape == turned.shape or is_flat


def _mixes(call: TorchCall[_Kind], made: Tensor) -> bool:
    """Whether a result has numbers that depend on several samples, beside those of one."""
    if call.of(_Kind.ROOT) and made.requires_grad:
        return not (_scales(call) or is_square(call.name, call.args))
    if (
        _compares_what_is_chosen(call)
        or call.name in BETWEEN_ALL
        or (call.name == "batch_norm" and call.argument("training", 5))
    ):
        return True
    if call.name in COMPARISONS and any(one.requires_grad for one in call.of(*OF_ALL)):
        return True
    if call.kind in OF_ALL and call.first.dim() and (_bends(call) or call.name in DEVIATIONS):
        return made.requires_grad
    is_sum = not made.dim() and order_of_norm(call.name, call.args, call.named) == 1
    return not (is_sum or _is_root(call, made)) and _mixes_samples(call, made)


def _compares_what_is_chosen(call: TorchCall[_Kind]) -> bool:
    """Whether samples get a statistic of all, as the number of each one's class."""
    samples, statistics = call.of(_Kind.SAMPLES), call.of(_Kind.STATISTIC)
    is_looked_up = call.name == "getitem" and call.kind is _Kind.STATISTIC
    return bool(samples) and (is_looked_up or takes_a_statistic(call, statistics))


def _scales(call: TorchCall[_Kind]) -> bool:
    """Whether a function multiplies or divides one tensor by a number of Python."""
    return call.name in (*PRODUCTS_OF_NUMBERS, *DIVISIONS) and len(call.tensors()) == 1


def _mixes_samples(call: TorchCall[_Kind], made: Tensor) -> bool:
    """Whether a function that is no root of a sum makes a number that depends on several."""
    name, first = call.name, call.first
    if call.kind is _Kind.SAMPLES and name in ALONG and (made.dim() or name not in NORMS):
        is_linear = name in STATISTICS and not made.requires_grad and not made.dim()
        return not is_linear and _is_along_samples(call, first)
    reads_an_extreme = _reads_an_extreme(call, made)
    if reads_an_extreme or (not made.dim() and made.requires_grad):
        is_number = call.kind in OF_ALL and not first.dim()
        numbers = [tensor for tensor, kind in call.kinds if _is_trained_number(tensor, kind)]
        is_bent = _is_no_sum(call, numbers) or (_bends(call) if is_number else name in NORMS)
        return reads_an_extreme or is_bent
    if name == "grad" or len(call.kinds) == 1:
        return name == "grad" and _is_mean(first)
    pair, both = [list(one) for one in zip(*call.kinds[:2], strict=True)]
    if name in PRODUCTS:
        other = _Kind.SAMPLES if name in TURNED_PRODUCTS else _Kind.TURNED
        are_matrices = all(one.dim() == 2 for one in pair)
        return are_matrices and set(both) == {_Kind.SAMPLES, other}
    if name == "einsum":
        return set(both) == {_Kind.SAMPLES} and einsum_mixes(call)
    return name in BETWEEN and _meets(name, pair, both)


def _bends(call: TorchCall[_Kind]) -> bool:
    """Whether a function of a mean over samples makes what is no mean over samples."""
    return call.name in CURVED or call.name in LIMITS


def _is_trained_number(tensor: Tensor, kind: _Kind) -> bool:
    """Whether a tensor is one number over all samples, with a gradient."""
    return kind in OF_ALL and not tensor.dim() and tensor.requires_grad


def _is_no_sum(call: TorchCall[_Kind], numbers: Sequence[Tensor]) -> bool:
    """Whether a function divides by a number over samples, or multiplies two of them.

    Dice over a whole batch is such a quotient.
    """
    if call.name in PRODUCTS_OF_NUMBERS:
        return len(numbers) > 1
    if call.name in DIVISIONS:
        divisor = call.argument("other")
        return any(divisor is one for one in numbers)
    return call.name in INVERSES and bool(numbers)


def _reads_an_extreme(call: TorchCall[_Kind], made: Tensor) -> bool:
    """Whether a result depends on the largest number of a batch, or is divided by it or such.

    Its difference from others keeps exponentials small, and a mask of lengths compares with it.
    """
    extremes = call.of(_Kind.EXTREME)
    is_trained = any(one.requires_grad for one in extremes) and made.requires_grad
    return (is_trained and call.name not in DIFFERENCES) or _is_no_sum(
        call, [*extremes, *call.of(_Kind.DEVIATION)]
    )


def _is_added_to_a_logarithm(call: TorchCall[_Kind]) -> bool:
    """Whether a call ends a logarithm of exponentials that its largest number kept small."""
    nodes = [type(one.grad_fn).__name__ for one in call.tensors()]
    return call.name in ("add", "radd") and any(node.startswith(LOGARITHMS) for node in nodes)


def _is_root(call: TorchCall[_Kind], made: Tensor) -> bool:
    """Whether a result is the root of one sum or mean over all samples."""
    if made.dim() or not made.requires_grad:
        return False
    if order_of_norm(call.name, call.args, call.named) == 2:
        return call.kind in (_Kind.SAMPLES, _Kind.TURNED)
    return _is_trained_number(*call.kinds[0]) and is_root(call.name, call.args)


def _is_mean(number: Tensor) -> bool:
    """Whether a number is a mean, whose gradient has a factor that depends on the batch's size."""
    node = number.grad_fn
    reduction = getattr(node, "_saved_reduction", None)
    return not number.dim() and (reduction == 1 or type(node).__name__.startswith("Mean"))


def _meets(name: str, pair: Sequence[Tensor], both: Sequence[_Kind]) -> bool:
    """Whether numbers of a sample meet those of others, or what was computed over all."""
    if _Kind.STATISTIC in both or _Kind.DEVIATION in both:
        is_nonlinear = name.endswith(("mul", "div", "multiply", "divide"))
        return _Kind.SAMPLES in both or (is_nonlinear and all(one.dim() for one in pair))
    short, long = sorted(pair, key=Tensor.dim)
    above = long.dim() - short.dim()
    if set(both) == {_Kind.SAMPLES, _Kind.TURNED}:
        return above == 0 and pair[both.index(_Kind.TURNED)].shape[0] == 1
    return set(both) == {_Kind.SAMPLES} and above > 0 and long.shape[above] == 1 < short.shape[0]


def _moves_first(call: TorchCall[_Kind], source: Tensor, made: Tensor) -> bool:
    """Whether a view of samples has their dim elsewhere than first."""
    if call.name in TURNS and source.dim() > 1:
        dims = [one for one in tree_leaves(call.args[1:]) if isinstance(one, int)]
        if call.name in ("permute", "movedim"):
            return bool(dims) and dims[0] % source.dim() != 0
        return source.dim() == 2 or any(dim % source.dim() == 0 for dim in dims)
    if call.name == "getitem":
        index = call.args[1]
        return (index[0] if isinstance(index, tuple) and index else index) is None
    return call.name == "unsqueeze" and made.shape[0] == 1 < source.shape[0]


def _is_along_samples(call: TorchCall[_Kind], source: Tensor) -> bool:
    """Whether a function works along the dim of samples, by its own choice or as it is asked."""
    return _is_along(call, source, 0)


def _is_along(call: TorchCall[_Kind], source: Tensor, place: int) -> bool:
    """Whether a function works along the dim at a place of a tensor [...]."""
    name = call.name
    dim = call.named.get("axis", call.argument("dim", 2 if name in DIM_IS_THIRD else 1))
    if isinstance(dim, Tensor):  # the other argument of a maximum of two
        return False
    dims = [one for one in tree_leaves(dim) if isinstance(one, int) and not isinstance(one, bool)]
    if not dims and "other" not in call.named:
        if name in OF_A_GUESSED_DIM:
            return source.dim() in (1, 3)
        return name in OF_ALL_DIMS or name == "msort" or (name in OF_LAST_DIM and source.dim() == 1)
    return any(one % source.dim() == place for one in dims)


def _is_statistic(call: TorchCall[_Kind], made: Tensor) -> bool:
    """Whether a result is a number over all samples, or one for each feature of theirs."""
    if call.name not in STATISTICS:
        return False
    if call.kind is _Kind.TURNED and made.dim():
        return call.first.dim() == 2 and _is_along(call, call.first, 1)
    samples = call.of(_Kind.SAMPLES)
    return bool(samples) and (not made.dim() or _is_along_samples(call, samples[0]))
