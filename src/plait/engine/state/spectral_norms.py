"""A warning where spectral norms iterate in several forwards of a step, and one device has one."""

from __future__ import annotations

import warnings

from torch import nn

from plait.engine.state.local_parameters import LocalParameters
from plait.errors import some_of


def warn_of_spectral_norms(holding: LocalParameters, plan: str, num: int) -> None:
    """Warn if a module here has a spectral norm; `num`: forwards of a step."""
    modules = holding.model.named_modules()
    norms = [path.partition(".parametrizations.")[0] for path, one in modules if _is_normed(one)]
    found = [path for path in norms if any(name.startswith(f"{path}.") for name in holding.params)]
    if found:
        warnings.warn(
            f"the spectral norm of {some_of(map(repr, found))} iterates once in each forward, and "
            f"the plan '{plan}' runs {num} in a step; one device iterates once, so that weights "
            f"differ until the iteration has converged; {num} batches whose gradients are added on "
            "one device do the same; take mb out of a plan without pp, or give spectral_norm a "
            "larger n_power_iterations",
            stacklevel=2,
        )


def _is_normed(module: nn.Module) -> bool:
    """Whether a module has a spectral norm, or is one, of the two kinds that torch has."""
    hooks = module._forward_pre_hooks.values()
    kinds = [type(one) for one in (module, *hooks)]
    return any(
        kind.__module__.startswith("torch.nn.utils") and kind.__name__.endswith("SpectralNorm")
        for kind in kinds
    )
