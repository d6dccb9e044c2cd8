"""The settings of a router: how tokens choose experts, how many an expert takes, and the
coefficients of its losses. A setting that no router can follow is refused here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.errors import ModelError

METHODS = ("greedy", "group_limited_greedy", "noaux_tc", "noisy", "expert_choice")
SCORINGS = ("softmax", "sigmoid")
DROP_POLICIES = ("score", "position")


@dataclass(frozen=True)
class RouterSettings:
    """How to route.

    Attributes:
        num_experts: E.
        num_chosen: k, the experts of a token (under `expert_choice`: on average).
        method: `greedy` top-k; `group_limited_greedy` (DeepSeek-V2: groups by their best expert);
            `noaux_tc` (DeepSeek-V3: groups by their two best); `noisy` (Shazeer et al. 2017,
            section 2.1); `expert_choice` (Zhou et al. 2022).
        scoring: of the logits: `softmax` over the experts, or `sigmoid` of each.
        normalise: whether the k weights of a token sum to one.
        scale: factor on the weights.
        num_groups, num_chosen_groups: experts come from the best groups only; 1 and 1 for no
            groups.
        capacity_factor: an expert takes at most ceil(factor k S / E) tokens of a sequence; None
            drops nothing.
        drop_by: what an overflowing expert keeps: the best by `score`, or the first by `position`.
        balance_coef, balance_per_sequence: of the balance loss, over all tokens of a micro-batch or
            within each sequence.
        z_coef: of the z-loss.
        bias_speed: of balancing by bias; 0 for none.
    """

    num_experts: int
    num_chosen: int
    method: str = "greedy"
    scoring: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    capacity_factor: float | None = None
    drop_by: str = "score"
    balance_coef: float = 0.0
    balance_per_sequence: bool = False
    z_coef: float = 0.0
    bias_speed: float = 0.0

    def __post_init__(self) -> None:
        for what, word, known in (
            ("topk_method", self.method, METHODS),
            ("scoring_func", self.scoring, SCORINGS),
            ("drop_policy", self.drop_by, DROP_POLICIES),
        ):
            if word not in known:
                raise ModelError(f"{what} = {word!r} is none of {', '.join(known)}")
        if not 1 <= self.num_chosen <= self.num_experts:
            raise ModelError(
                f"num_experts_per_tok = {self.num_chosen} must be from 1 to num_local_experts = "
                f"{self.num_experts}"
            )
        if self.num_experts % self.num_groups or not 1 <= self.num_chosen_groups <= self.num_groups:
            raise ModelError(
                f"n_group = {self.num_groups} must divide num_local_experts = "
                f"{self.num_experts}, and "
                f"topk_group = {self.num_chosen_groups} be from 1 to n_group"
            )
        if self.num_chosen > self.num_chosen_groups * (self.num_experts // self.num_groups):
            raise ModelError(
                f"topk_group = {self.num_chosen_groups} groups hold fewer than {self.num_chosen} "
                "experts"
            )
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ModelError(
                f"capacity_factor = {self.capacity_factor} must be above 0; leave it out to drop "
                "nothing"
            )
        if self.method == "expert_choice" and (self.balance_coef or self.bias_speed):
            raise ModelError(
                "topk_method = 'expert_choice' is balanced by itself; leave router_aux_loss_coef "
                "and the bias out"
            )

    def capacity(self, num_positions: int) -> int:
        """The tokens of a sequence that one expert takes at most."""
        if self.capacity_factor is None and self.method != "expert_choice":
            return num_positions
        wanted = (self.capacity_factor or 1.0) * self.num_chosen * num_positions / self.num_experts
        return min(num_positions, math.ceil(wanted))
