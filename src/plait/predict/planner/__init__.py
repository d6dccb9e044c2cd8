"""Choose: enumerate the plans of a cluster, drop what cannot work, rank the rest and say why the
others lost.
"""

from plait.predict.planner.answers import choose
from plait.predict.planner.choose import NothingFits

__all__ = ["NothingFits", "choose"]
