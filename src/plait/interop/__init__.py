"""Configs of other frameworks as a plan and a config of plait, with a word on every key.

The way back, a plan in the words of another framework, is `plait.predict.planner.export`.
"""

from plait.interop.api import FRAMEWORKS, import_file, import_text
from plait.interop.source import Imported, Unmapped

__all__ = ["FRAMEWORKS", "Imported", "Unmapped", "import_file", "import_text"]
