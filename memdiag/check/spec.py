"""What one run of a check is to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

SEED = 20_261
"""Of Python's, NumPy's and PyTorch's random generators when a run begins; a script's own seeds come after."""

SPEC, RESULT, TIMES, RECORDED, VALUES, REFUSED, OUTPUT = (
    "spec.json", "run.jsonl", "times.json", "run.mdiag", "values", "refused.txt", "output.txt")
"""Names of what is in the folder of a run."""


@dataclass(frozen=True)
class Regions:
    """What is made checkpoints in a run.

    Attributes:
        regions: module names of each, with the operators that it keeps.
        patterns: ranges and patterns of module names; each module that they stand for is a region by itself.
    """

    regions: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()
    patterns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    """One run of a script.

    Attributes:
        what: "compare" takes digests of what a step comes to; "values" keeps the values themselves of what is listed
            in ``wanted``; "record" records memory, and "probe" what plans are made from besides; "time" looks only at
            when steps end.
        path, module, args: the script.
        regions: the checkpoints to put into it; None for the script as it is.
        steps: training steps after which it ends.
        wanted: (number of the optimizer's step, stage, name, number) of values to keep.
    """

    what: str
    path: str | None
    module: str | None
    args: tuple[str, ...]
    regions: Regions | None
    steps: int
    wanted: tuple[tuple[int, str, str, int], ...] = ()

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Spec:
        held = json.loads(path.read_text(encoding="utf-8"))
        regions = held["regions"]
        if regions is not None:
            regions = Regions(
                tuple((tuple(modules), tuple(keep)) for modules, keep in regions["regions"]),
                tuple(regions["patterns"]))
        return Spec(
            held["what"], held["path"], held["module"], tuple(held["args"]), regions, held["steps"],
            tuple((int(step), str(stage), str(name), int(nth)) for step, stage, name, nth in held["wanted"]))
