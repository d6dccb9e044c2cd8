"""The plan and the sections that an importer fills, and their last checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from plait.errors import ConfigError, PlanError
from plait.interop.source import Imported, Source
from plait.plan import PipelineAxis, Plan
from plait.plan.facts import DATA_STRATEGIES, SCHEDULES, ZERO, DataStrategy
from plait.values import JsonObject

ZERO_STRATEGIES: Final[tuple[DataStrategy, ...]] = (DATA_STRATEGIES[0], *ZERO.values())
"""The data strategy of each ZeRO stage, from 0 to 3."""
SCHEDULE_BY_TORCH_NAME: Final = {
    facts.torch_name.lower(): name for name, facts in SCHEDULES.items() if facts.torch_name
}
"""Schedules by the name that torch gives them, in small letters."""
PLAIN_SCHEDULE: Final = PipelineAxis(2).schedule
"""The schedule of a pipeline that names none."""
INTERLEAVED: Final = next(name for name, facts in SCHEDULES.items() if facts.needs_virtual)
"""The schedule of several stages a rank."""


@dataclass
class Draft:
    """The result so far. Sizes are ranks; `micro_batches` is per step and data rank."""

    source: Source
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    schedule: str = PLAIN_SCHEDULE
    virtual: int | None = None
    cp: int = 1
    context: str = "ring"
    ep: int = 1
    whole_experts: bool = False
    """The file says that no tensor axis cuts an expert."""
    dp: int | None = None
    """None until it is known; the world size or the batch may say it."""
    strategy: str = "allreduce"
    replicate: int = 1
    offload: bool = False
    micro_batches: int | None = None
    micro_batch_size: int | None = None
    global_batch: int | None = None
    remat: str = "none"
    precision: str = "float32"
    compile: bool = False
    assumed: list[str] = field(default_factory=list)
    """A sentence for each number that the file does not say and the plan needs."""
    sections: dict[str, JsonObject] = field(
        default_factory=lambda: {"model": {}, "data": {}, "train": {}}
    )

    def put(self, section: str, **values: object) -> None:
        """Set keys of a section; None leaves a key out."""
        table = self.sections.setdefault(section, {})
        table.update({key: value for key, value in values.items() if value is not None})

    def finish(self, batch_keys: Mapping[str, str] | None = None) -> Imported:
        """Check the numbers against each other and give the result.

        `batch_keys` names the file's keys for messages: `global`, `micro`, `accumulation`.
        Errors: `ConfigError` for numbers that cannot all be true.
        """
        source = self.source
        names = {"global": "the global batch", "micro": "the micro-batch", **(batch_keys or {})}
        self._find_sizes(names)
        plan = self._plan()
        if self.global_batch is not None:
            self.put("train", global_batch=self.global_batch)
        if self.sections["data"]:  # whose data it is, each framework says in its own code
            self.sections["data"].setdefault("name", "random")
        config = {name: table for name, table in self.sections.items() if table}
        config["plan"] = {"text": str(plan)}
        source.finish()
        named = _names(source)
        mapped = [key for key in source.values if key in source.read and key not in named]
        return Imported(
            framework=source.framework,
            plan=str(plan),
            config=config,
            mapped=mapped,
            unmapped=source.unmapped,
            assumed=self.assumed,
        )

    def _find_sizes(self, names: Mapping[str, str]) -> None:
        """The data axis and the number of micro-batches, from the world and the batch."""
        others = self.tp * self.pp * self.cp
        world = self.source.world_size
        if world is not None and self.dp is None:
            if world % others:
                raise ConfigError(
                    f"{self.source.framework}: {world} ranks do not divide by tp{self.tp} x "
                    f"pp{self.pp} x cp{self.cp} = {others}"
                )
            self.dp = world // others
        shares = None
        if self.global_batch is not None and self.micro_batch_size is not None:
            if self.global_batch % self.micro_batch_size:
                raise ConfigError(
                    f"{self.source.framework}: {names['global']} = {self.global_batch} does not "
                    f"divide by {names['micro']} = {self.micro_batch_size}"
                )
            shares = self.global_batch // self.micro_batch_size
        is_open = self.dp is None and (shares is None or self.micro_batches is None)
        if shares is not None:
            self._divide(shares, names)
        if self.dp is None and self.ep > self.cp:  # experts borrow the ranks of data and context
            self.dp = -(-self.ep // self.cp)
        self.dp = self.dp or 1
        if is_open:
            self.assumed.append(
                f"the file does not say the number of ranks: dp{self.dp} is taken, which makes "
                f"{self.dp * others}; say --gpus N"
            )
        ranks = self.dp * self.cp
        folds = self.whole_experts and self.sequence_parallel and self.ep == ranks * self.tp
        if ranks % self.ep and not folds:
            self._note_experts(ranks)
            self.ep = math.gcd(self.ep, ranks)
        self.micro_batches = self.micro_batches or 1
        if self.global_batch is None and self.micro_batch_size is not None:
            self.global_batch = self.micro_batch_size * self.dp * self.micro_batches

    def _note_experts(self, ranks: int) -> None:
        keys = [key for key in self.source.taken if "expert" in key and "parallel" in key]
        for key in keys[:1]:
            self.source.note(
                key,
                "different",
                f"experts may fold over tensor ranks there; here ep{self.ep} borrows its ranks "
                f"from dp x cp = {ranks}, so ep{math.gcd(self.ep, ranks)} is taken",
            )

    def _divide(self, shares: int, names: Mapping[str, str]) -> None:
        """Split `shares` = dp x micro-batches into what is known and what follows."""
        if self.micro_batches is not None and self.dp is None:
            self.dp = self._quotient(shares, self.micro_batches, names)
        elif self.dp is not None and self.micro_batches is None:
            self.micro_batches = self._quotient(shares, self.dp, names)
        elif self.dp is not None and self.micro_batches is not None:
            if self.dp * self.micro_batches != shares:
                raise ConfigError(
                    f"{self.source.framework}: {names['global']} = {self.global_batch} is not "
                    f"{names['micro']} {self.micro_batch_size} x {self.micro_batches} "
                    f"micro-batches x {self.dp} data ranks"
                )
        elif self.pp > 1:
            borrowed = -(-self.ep // self.cp)  # experts borrow the ranks of data and context
            self.dp = borrowed if shares % borrowed == 0 else None
            self.micro_batches = shares // (self.dp or 1)
        else:
            self.dp = shares

    def _quotient(self, shares: int, size: int, names: Mapping[str, str]) -> int:
        if shares % size:
            raise ConfigError(
                f"{self.source.framework}: {names['global']} / {names['micro']} = {shares} does "
                f"not divide by {size}"
            )
        return shares // size

    def _plan(self) -> Plan:
        terms: list[str] = []
        if self.pp > 1:
            tail = f",v{self.virtual}" if self.virtual is not None else ""
            terms.append(f"pp{self.pp}:{self.schedule}{tail}")
        if self.tp > 1:
            terms.append(f"tp{self.tp}:1d,sp" if self.sequence_parallel else f"tp{self.tp}:1d")
        if self.cp > 1:
            terms.append(f"cp{self.cp}:{self.context}")
        if self.ep > 1:
            terms.append(f"ep{self.ep}")
        dp = f"dp{self.dp}"
        if self.strategy != "allreduce":
            dp += f":{self.strategy}"
            dp += f",replicate{self.replicate}" if self.replicate > 1 else ""
            dp += ",offload" if self.offload else ""
        terms += [dp, f"mb{self.micro_batches}"]
        terms += [f"remat:{self.remat}"] if self.remat != "none" else []
        terms += [f"precision:{self.precision}"] if self.precision != "float32" else []
        terms += ["compile"] if self.compile else []
        text = " ".join(terms)
        try:
            return Plan.parse(text).check()
        except PlanError as error:
            raise ConfigError(
                f"{self.source.framework}: the file means '{text}', which no plan can be: {error}"
            ) from None


def _names(source: Source) -> set[str]:
    return {item.key for item in source.unmapped if item.kind != "different"}
