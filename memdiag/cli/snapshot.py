"""``memdiag snapshot``: the report of a memory snapshot that PyTorch wrote, as text, as JSON, or as a run file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memdiag.cli import paths
from memdiag.cli.output import json_path, show, show_or_write

if TYPE_CHECKING:
    from memdiag.trace import Trace


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--device", type=click.IntRange(0), metavar="N",
              help="Read the memory of device N alone; else of all, and the report is about the one that ran out of "
                   "memory, or had most.")
@click.option("--events", metavar="FIRST:LAST",
              help="Report only on the events FIRST to LAST - 1 of the record, counted from 0.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="RUN.mdiag",
              help="Also write it as a run file, which the other commands read.")
@click.option("--json", "json_file", metavar="FILE", help="Also write all of it as JSON; with -, print only that.")
@click.option("-f", "--force", is_flag=True, help="Replace files if they exist.")
def snapshot(
    file: Path, device: int | None, events: str | None, output: Path | None, json_file: str | None, force: bool
) -> Callable[[], int]:
    """Print the report of a CUDA memory snapshot.

    FILE is a pickle of torch.cuda.memory._dump_snapshot or of
    torch.cuda.memory_snapshot(), of PyTorch 2.0 or later. Nothing in it is
    run, and no GPU is needed.
    """
    return functools.partial(_snapshot, file, device, _range(events), output, json_file, force)


def _range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise click.BadParameter(f"{text!r} is no range such as 1000:2000", param_hint="--events")
    return int(first), int(last)


def _snapshot(
    file: Path, device: int | None, events: tuple[int, int] | None, output: Path | None, json_file: str | None,
    force: bool,
) -> int:
    destination = json_path(json_file, [file], force)
    if output is not None:
        paths.check_apart([output, *([] if destination is None else [destination])], inputs=[file])
        paths.check_new(output, force)
    from memdiag.report import render_text, summarize, to_json
    from memdiag.snapshot.read import read_snapshot
    from memdiag.snapshot.to_trace import trace_of

    trace = trace_of(read_snapshot(file), device, events)
    summary = summarize(trace, _about(trace))
    if output is not None:
        _write(trace, output)
    show_or_write(lambda: render_text(summary), lambda: to_json(summary), json_file, destination)
    if output is not None and json_file != "-":
        show(f"wrote {output}")
    return 0


def _about(trace: Trace) -> str:
    """The device that the report is about: that of the last request that failed, else the one with the highest peak."""
    from memdiag.trace.timeline import timeline

    failed = trace["out_of_memory"]["device"]
    if len(failed):
        return str(trace.about["devices"][int(failed[-1])])
    return max((str(name) for name in trace.about["devices"]), key=lambda name: timeline(trace, name).peak_bytes)


def _write(trace: Trace, path: Path) -> None:
    from memdiag.trace import Writer

    with paths.whole(path) as part:
        writer = Writer(part, trace.about)
        writer.text(trace.text)
        for name, table in trace.tables.items():
            writer.table(name, {column: values.tolist() for column, values in table.items()})
        writer.close()
