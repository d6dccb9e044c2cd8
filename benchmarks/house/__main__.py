"""Print the table: `python -m benchmarks.house`."""

from __future__ import annotations

import json
import sys

from benchmarks.house import text
from benchmarks.house.step import walk_step


def table() -> dict[str, str]:
    """Every figure by its name; a row is a sentence about the text, a cell a number."""
    zero3 = walk_step("dp2:zero3")
    hybrid = walk_step("pp2:1f1b tp2 mb2")
    alone = walk_step("dp1")
    thousands = text.num_lines() / 1000
    several = {name: at for name, at in text.class_names().items() if len(at) > 1}
    return {
        "files entered in a step, dp2:zero3 / pp2:1f1b tp2": (
            f"{len(zero3.files)} / {len(hybrid.files)}"
        ),
        "functions entered": f"{len(zero3.functions)} / {len(hybrid.functions)}",
        "classes whose methods run in it": f"{len(zero3.classes)} / {len(hybrid.classes)}",
        "frames before the model's forward, dp1": f"{alone.frames_before_model}",
        "classes named in build": f"{len(text.names_in_build())}",
        "DataStrategy, public members": f"{len(text.public_members('DataStrategy'))}",
        "Axis, public operations": f"{len(text.public_members('Axis', operations_only=True))}",
        "files with a schedule's name": f"{len(text.files_with_words(text.SCHEDULES))}",
        "files with a ZeRO stage's name": f"{len(text.files_with_words(text.ZERO_STAGES))}",
        "Any": f"{text.num_any()}",
        f"lines over {text.MAX_COLUMNS} columns": f"{text.lines_over()}",
        "tuple assignments per 1,000 lines": f"{text.tuple_assignments() / thousands:.1f}",
        "nested comprehensions over several lines": f"{text.nested_comprehensions()}",
        "import circles": f"{len(text.import_circles())}",
        "class names with several classes": f"{len(several)}",
        "files; lines": f"{len(text.files())}; {text.num_lines()}",
    }


def main() -> None:
    """One row a figure; `--json` for programs, `--names` for what stands behind the counts."""
    if "--names" in sys.argv:
        for title, names in {
            "build": text.names_in_build(),
            "DataStrategy": text.public_members("DataStrategy"),
            "Axis": text.public_members("Axis", operations_only=True),
            "schedules": text.files_with_words(text.SCHEDULES),
            "ZeRO": text.files_with_words(text.ZERO_STAGES),
            "circles": text.import_circles(),
            "classes": [f"{k} x{len(v)}" for k, v in text.class_names().items() if len(v) > 1],
        }.items():
            print(f"{title} ({len(names)}): {', '.join(str(name) for name in names)}\n")
        return
    rows = table()
    if "--json" in sys.argv:
        print(json.dumps(rows, indent=2))
        return
    width = max(len(name) for name in rows)
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
