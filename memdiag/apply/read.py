"""What a plan says: regions, from a plan file, from what such a file holds, or from module paths alone."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memdiag.errors import MemdiagError
from memdiag.modulenames import matching
from memdiag.runfile import is_run_file
from memdiag.trace.models import Model, models

SCHEMA_VERSION = 1
"""Of plan files: the newest that is understood."""

Plan = str | os.PathLike[str] | Mapping[str, Any] | Sequence[str]


@dataclass(frozen=True)
class Region:
    """Modules that run as one checkpoint.

    Attributes:
        modules: their qualified names, as in ``named_modules()``; several follow each other in one ``nn.Sequential``.
        keep: operators whose results are kept instead of computed again, such as ``aten::mm``.
        model: whose modules they are, by its name in the script that was planned; None where that is not known.
    """

    modules: tuple[str, ...]
    keep: tuple[str, ...] = ()
    model: str | None = None

    def __str__(self) -> str:
        return ", ".join(path or "the whole model" for path in self.modules)


def read(plan: Plan, allow_unsafe: Collection[str] = ()) -> tuple[list[Region], list[Model]]:
    """The regions of a plan, of several plans in a file those of the chosen one; and the models of the script that was
    planned, as far as the plan tells.

    Raises:
        MemdiagError: it is not a plan, is of a newer schema, or has a region that is unsafe and not allowed.
    """
    if isinstance(plan, Mapping):
        return _chosen(plan, "the plan", allow_unsafe)
    if isinstance(plan, (str, os.PathLike)):
        if is_run_file(plan):
            raise MemdiagError(f"{os.fspath(plan)}: is a run file; make a plan file of it with `memdiag plan "
                               f"{os.fspath(plan)} --json plan.json`")
        try:
            with open(plan, encoding="utf-8") as file:
                return _chosen(json.load(file), os.fspath(plan), allow_unsafe)
        except OSError as error:
            raise MemdiagError(f"{os.fspath(plan)}: {error.strerror} (a plan file is expected; "
                               "module paths go in a list)") from error
        except ValueError as error:
            raise MemdiagError(f"{os.fspath(plan)}: is not a plan file, for it is not JSON ({error})") from error
    if not isinstance(plan, Sequence) or isinstance(plan, bytes) or not all(isinstance(path, str) for path in plan):
        raise MemdiagError("a plan is the path of a plan file, what such a file holds, or a list of module paths")
    return [Region((path,)) for path in plan], []


def _chosen(held: Any, source: str, allow_unsafe: Collection[str]) -> tuple[list[Region], list[Model]]:
    version = held.get("schema_version") if isinstance(held, Mapping) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise MemdiagError(f"{source}: is of a newer memdiag (schema version {version}; this one reads up to "
                           f"{SCHEMA_VERSION}); update memdiag")
    try:
        if version != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {version!r}")
        chosen = held["chosen"]
        if chosen is None:
            raise MemdiagError(f"{source}: chooses no plan, for none fits the budget that was given")
        if not isinstance(chosen, int) or chosen < 0:
            raise ValueError(f"chosen is {chosen!r}")
        regions = [_region(region) for region in held["plans"][chosen]["regions"]]
        known = models(held.get("about") or {})
        unsafe = {one["module"]: "; ".join(why["text"] + (f" ({why['line']})" if why["line"] else "")
                                           for why in one["reasons"])
                  for one in held.get("safety", ()) if one["verdict"] == "unsafe"}
    except (LookupError, TypeError, ValueError) as error:
        raise MemdiagError(f"{source}: is not a plan as `memdiag plan --json` writes them "
                           f"({type(error).__name__}: {error})") from error
    asked = {allow_unsafe} if isinstance(allow_unsafe, str) else set(allow_unsafe)
    allowed = {path for one in asked for path in matching(one, unsafe)}
    refused = [path for region in regions for path in region.modules if path in unsafe and path not in allowed]
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise MemdiagError(f"{refused[0]}: is unsafe to run twice: {unsafe[refused[0]]}{more}. To apply the plan all "
                           f"the same, pass allow_unsafe={[*sorted(allowed), *refused]!r}, or --allow to "
                           "`memdiag check`")
    return regions, known


def _region(held: Mapping[str, Any]) -> Region:
    modules, kind, keep = held["modules"], held["kind"], held.get("keep") or ()
    if kind not in ("full", "selective") or (kind == "selective") != bool(keep):
        raise ValueError(f"a region of kind {kind!r} that keeps {list(keep)}")
    names = (*modules, *keep)
    if not modules or isinstance(modules, str) or isinstance(keep, str) or not all(isinstance(n, str) for n in names):
        raise ValueError(f"a region of the modules {modules!r}")
    model = held.get("model")
    if model is not None and not isinstance(model, str):
        raise ValueError(f"a region of the model {model!r}")
    return Region(tuple(modules), tuple(keep), model)
