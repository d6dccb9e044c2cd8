"""Paper and formula of every strategy that a term can name.

The formulae use the letters of the small case. X is the input of a layer, Y its output, W its
weight. The gradient of the loss is d, a rank r, the number of ranks n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True)
class PaperSource:
    """The idea of a strategy in words, its formula, and the paper that it is from."""

    title: str
    idea: str
    formula: str
    paper: str


_ZERO: Final = "S. Rajbhandari et al., ZeRO (SC 2020, arXiv 1910.02054)"
_QI: Final = "Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241)"
_VEE: Final = "Qi et al., Pipeline Parallelism with Controllable Memory (arXiv 2405.15362)"
_SHOEYBI: Final = "M. Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3"

SOURCES: Final[Mapping[str, PaperSource]] = MappingProxyType(
    {
        "one": PaperSource(
            "one rank",
            "One rank does all the work. Micro-batches run one after the other, and their "
            "gradients add up before the one update.",
            "dW = sum over micro-batches of dY^T X / number of samples",
            "P. Goyal et al., Accurate, Large Minibatch SGD (arXiv 1706.02677), section 2",
        ),
        "allreduce": PaperSource(
            "data parallel, all-reduce",
            "Every rank holds the whole model and takes a part of the samples. The gradients of "
            "all ranks are added up, and every rank makes the same update.",
            "dW = sum over r of dW_r;  2 (n-1)/n of the gradients sent by a rank",
            "S. Li et al., PyTorch Distributed (VLDB 2020, arXiv 2006.15704), section 3.2",
        ),
        "ring": PaperSource(
            "data parallel, ring all-reduce",
            "As all-reduce, but the sum goes round a ring in n chunks. In the first n-1 steps a "
            "rank adds the chunk that comes. In the next n-1 steps it keeps the finished chunk.",
            "step s: rank r sends chunk r-s to rank r+1;  2 (n-1)/n of the gradients in all",
            "P. Patarasuk and X. Yuan, Bandwidth Optimal All-reduce (JPDC 2009), section 3",
        ),
        "server": PaperSource(
            "data parallel, parameter server",
            "Each weight has a server rank. Workers push their gradients to it. It adds them up, "
            "makes the update, and sends the new weight to all.",
            "push: dW_r to server(W);  W <- W - lr sum over r of dW_r;  pull: W to all",
            "M. Li et al., Scaling Distributed ML with the Parameter Server (OSDI 2014)",
        ),
        "async-server": PaperSource(
            "data parallel, asynchronous parameter server",
            "A worker pushes its gradient and gets the newest weights back, without waiting for "
            "all. The bound K says how many updates a gradient may be late.",
            "W(t+1) = W(t) - lr dW_r(t - s),  s <= K",
            "Q. Ho et al., Stale Synchronous Parallel Parameter Server (NIPS 2013), section 3",
        ),
        "zero1": PaperSource(
            "ZeRO-1: the optimizer's state in shards",
            "Every rank holds all weights and gradients, and the optimizer's state of its own "
            "shard alone. It gets the sum of its shard's gradients, updates the shard, and the "
            "new shards are gathered.",
            "g_r = reduce-scatter(dW);  W_r <- update(W_r, g_r);  W = all-gather(W_r)",
            f"{_ZERO}, section 5.1 (P_os)",
        ),
        "zero2": PaperSource(
            "ZeRO-2: gradients in shards too",
            "As ZeRO-1, and a rank keeps the gradients of its own shard alone: a full gradient is "
            "freed as soon as it is reduced.",
            "g_r = reduce-scatter(dW), then dW is freed;  W = all-gather(update(W_r, g_r))",
            f"{_ZERO}, section 5.2 (P_os+g)",
        ),
        "zero3": PaperSource(
            "ZeRO-3: weights in shards too",
            "A weight lives in shards. It is gathered just before a layer uses it, and freed just "
            "after. Backward gathers it again, and its gradient is reduced to shards.",
            "forward: W = all-gather(W_r), Y = X W^T, free W;  backward: again, then "
            "g_r = reduce-scatter(dW)",
            f"{_ZERO}, section 5.3 (P_os+g+p)",
        ),
        "local": PaperSource(
            "local SGD",
            "Every rank trains by itself for H steps and sends nothing. Then the ranks take the "
            "mean of how far they went.",
            "x_r: H steps of its own;  anchor <- anchor - lr sum over r of w_r (anchor - x_r)",
            "A. Douillard et al., DiLoCo (arXiv 2311.08105), algorithm 1; S. Stich (ICLR 2019)",
        ),
        "1d": PaperSource(
            "tensor parallel, 1D",
            "The first layer of a pair is cut by output features (column), the second by input "
            "features (row). Between the two nothing is sent. After the second the ranks add up.",
            "Y_r = X W1_r^T;  Z = sum over r of Y_r W2_r^T;  backward: dX = sum over r of dX_r",
            _SHOEYBI,
        ),
        "1d,sp": PaperSource(
            "tensor parallel, 1D with sequence parallel",
            "As 1D, but between pairs each rank holds a part of the sequence. The all-reduce "
            "becomes a reduce-scatter behind a pair and an all-gather before the next.",
            "X = all-gather(X_r);  Y_r = X W1_r^T;  Z_r = reduce-scatter(Y_r W2_r^T)",
            "V. Korthikanti et al., Reducing Activation Recomputation (arXiv 2205.05198), "
            "section 4.2.2",
        ),
        "2d": PaperSource(
            "tensor parallel, 2D (SUMMA)",
            "Ranks form a grid of q x q. Rank (i, j) holds block (i, j) of every matrix. A "
            "product takes q steps: in step t blocks t are sent along rows and columns, and every "
            "rank multiplies and adds.",
            "Y_ij = sum over t of X_it W_jt^T",
            "Q. Xu et al., An Efficient 2D Method (Optimus, arXiv 2104.05343), section 3; R. van "
            "de Geijn and J. Watts, SUMMA (1997), section 3",
        ),
        "2.5d": PaperSource(
            "tensor parallel, 2.5D (layers of grids)",
            "d layers of q x q ranks. Every layer holds the same blocks of the weights, and "
            "takes its own samples as in 2D. Gradients of weights are added up over the layers.",
            "Y_ijk = sum over t of X_itk W_jt^T;  dW_ij = sum over layers k of dW_ijk",
            "B. Wang et al., Tesseract (arXiv 2105.14500), section 3",
        ),
        "3d": PaperSource(
            "tensor parallel, 3D",
            "Ranks form a cube of q x q x q. Inputs are gathered along one axis of the cube, "
            "weights along another. Each rank multiplies once, and the sums are scattered along "
            "the third.",
            "Y = reduce-scatter_l(all-gather_j(X) all-gather_i(W)^T)",
            "Z. Bian et al., Maximizing Parallelism in Distributed Training (arXiv 2105.14450), "
            "section 3",
        ),
        "ep": PaperSource(
            "expert parallel",
            "Each rank holds some of the experts. A router chooses an expert for each token. An "
            "all-to-all sends tokens to the ranks of their experts, and a second brings the "
            "results back.",
            "y_t = p_e(t) Expert_e(x_t),  e = argmax of softmax(W_router x_t)",
            "D. Lepikhin et al., GShard (arXiv 2006.16668), section 3.2; W. Fedus et al., Switch "
            "Transformers (arXiv 2101.03961), equations 1 and 2",
        ),
        "cp ring": PaperSource(
            "context parallel, ring attention",
            "Each rank holds a part of the sequence: an early and a late chunk, so that the work "
            "is even. Queries stay. Keys and values travel round a ring, and partial results are "
            "joined by their log-sum-exp.",
            "O = sum over s of exp(l_s - l) O_s,  l = log sum over s of exp(l_s)",
            "H. Liu et al., Ring Attention with Blockwise Transformers (arXiv 2310.01889), "
            "section 3",
        ),
        "cp ulysses": PaperSource(
            "context parallel, Ulysses",
            "Each rank holds a part of the sequence. Before attention an all-to-all exchanges "
            "parts of the sequence for heads, so that each rank has whole sequences of some "
            "heads. After it, another brings them back.",
            "[S/n, H] -> all-to-all -> [S, H/n];  attention;  [S, H/n] -> all-to-all -> [S/n, H]",
            "S. Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509), section 3",
        ),
        "naive": PaperSource(
            "pipeline, naive",
            "One micro-batch at a time goes through all stages and back. Only one rank works at "
            "any time.",
            "bubble = (p-1)/p",
            "Y. Huang et al., GPipe (arXiv 1811.06965), figure 2b",
        ),
        "gpipe": PaperSource(
            "pipeline, GPipe",
            "All micro-batches go forward, then all go backward. Each stage keeps the "
            "activations of all of them.",
            "bubble = (p-1)/(m+p-1);  m micro-batches kept",
            "Y. Huang et al., GPipe (arXiv 1811.06965), figure 2c",
        ),
        "1f1b": PaperSource(
            "pipeline, 1F1B",
            "After a few forwards to fill the pipeline, each rank does one forward and one "
            "backward in turn. Stage s keeps at most p-s micro-batches.",
            "bubble = (p-1)/(m+p-1);  p-s micro-batches kept",
            "D. Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (arXiv "
            "2006.09503), figure 4",
        ),
        "interleaved": PaperSource(
            "pipeline, interleaved 1F1B",
            "Each rank holds v stages that lie far apart. The pipeline fills v times faster, and "
            "sends v times as much.",
            "bubble = (p-1)/v of the time of a micro-batch",
            "D. Narayanan et al., Megatron-LM (arXiv 2104.04473), section 2.2, figure 4",
        ),
        "zb-h1": PaperSource(
            "pipeline, ZB-H1",
            "The backward is split in two: I for the input's gradient, W for the weight's. I "
            "must be quick, as another rank waits for it. W fills time that would be idle.",
            "bubble = (p-1)(F+I-W);  the memory of 1F1B",
            f"{_QI}, section 2.1, figure 3, table 2",
        ),
        "zb-h2": PaperSource(
            "pipeline, ZB-H2",
            "As ZB-H1, with more forwards at the beginning: with equal times nothing is idle.",
            "bubble = (p-1)(F+I-2W);  2p-1 micro-batches kept",
            f"{_QI}, section 2.2, figure 3, table 2",
        ),
        "zbv": PaperSource(
            "pipeline, ZBV",
            "Two stages a rank in the shape of a V: rank 0 has the first and the last. No idle "
            "time with equal times, and the memory of 1F1B on every rank.",
            "bubble = 0 where F = I = W;  p micro-batches kept on every rank",
            f"{_QI}, section 6; {_VEE}, section 3.3",
        ),
        "v-half": PaperSource(
            "pipeline, V-Half",
            "As ZBV, with half of 1F1B's memory, and some idle time.",
            "p/2 + 1 micro-batches kept on every rank",
            f"{_VEE}, section 3.3, table 1",
        ),
        "v-min": PaperSource(
            "pipeline, V-Min",
            "As ZBV, with a third of 1F1B's memory, and more idle time.",
            "p/3 + 2 micro-batches kept on every rank",
            f"{_VEE}, section 3.3, table 1",
        ),
        "dualpipev": PaperSource(
            "pipeline, DualPipeV",
            "Two stages a rank in the shape of a V. A forward stands beside a backward wherever "
            "both are there, so that one computes while the other sends.",
            "bubble = (p/2-1)(F&B + B - 3W) for DualPipe; here its V half",
            "DeepSeek-V3 (arXiv 2412.19437), section 3.2.1, table 2",
        ),
        "pipedream": PaperSource(
            "pipeline, PipeDream",
            "The pipeline never drains: each stage updates after each backward. A micro-batch "
            "uses in its backward the weights of its forward, which the stage has kept.",
            "w(t+1) = w(t) - lr grad f(w_1(t-p+1), ..., w_p(t));  p-s versions kept",
            "D. Narayanan et al., PipeDream (arXiv 1806.03377), section 3.3",
        ),
        "2bw": PaperSource(
            "pipeline, PipeDream-2BW",
            "The pipeline never drains. Gradients of m micro-batches make one update, and every "
            "stage keeps two versions of its weights.",
            "W(t+1) = W(t) - lr grad f(W(t-1))",
            "D. Narayanan et al., PipeDream-2BW (arXiv 2006.09503), section 3.1",
        ),
    }
)

OPERATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "multiply": "C = A B",
        "attention": "O = softmax(Q K^T / sqrt(K)) V",
        "all_reduce": "out_r = sum over s of in_s",
        "reduce_scatter": "out_r = sum over s of in_s[part r]",
        "all_gather": "out_r = [in_0, in_1, ...]",
        "all_to_all": "out_r[part s] = in_s[part r]",
        "broadcast": "out_r = in_root",
        "reduce": "out_root = sum over s of in_s",
        "send": "out_peer = in_r",
        "receive": "out_r = in_peer",
        "shift": "out_(r+k) = in_r",
        "push": "gradients to the servers",
        "pull": "weights from the servers",
        "control": "sums of the loss, the number of samples and the squared norm",
    }
)
