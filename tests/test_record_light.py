"""Light recording, and cuts of the stream, against the same run recorded in full and in one piece."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from recording import GPT, Seen, convnet, mlp, record
from torch import nn

from memdiag.record import recorder
from memdiag.trace import NONE, Kind, Level, Phase
from memdiag.trace.peak import phase_peaks, worst


def train(model: nn.Module, batch: Callable[[int], torch.Tensor], steps: int) -> None:
    """Steps of growing and shrinking batches, an evaluation after every third."""
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(1 + step * 3 % 7)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 3 == 2:
            with torch.no_grad():
                model(batch(2))


RUNS: dict[str, Callable[[], None]] = {
    "gpt": lambda: train(GPT(), lambda n: torch.randint(50, (n, 8)), 7),
    "convnet": lambda: train(convnet(), lambda n: torch.randn(2 * n, 3, 8, 8), 7),
    "mlp": lambda: train(mlp(), lambda n: torch.randn(n, 20), 7),
}


def in_parts() -> None:
    """A model whose parts the loop calls one by one, two batches a step."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(2):
            x = model.embedding(torch.randint(50, (2, 8)))
            for block in model.blocks:
                x = block(x) * 2
            model.head(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module", params=RUNS)
def full(request: pytest.FixtureRequest) -> tuple[str, Seen]:
    return request.param, record(RUNS[request.param])


def peaks(seen: Seen) -> dict[tuple[int, int], int]:
    found = phase_peaks(seen.trace, seen.nest, seen.line)
    return {(int(s), int(p)): int(b) - start_of(seen) for s, p, b in zip(
        found.step, found.phase, found.bytes, strict=True) if s != NONE}


def merged(found: dict[tuple[int, int], int]) -> dict[tuple[int, str], int]:
    """Forward and the rest as one: between module calls, light recording does not see what the script does."""
    result: dict[tuple[int, str], int] = {}
    for (step, phase), size in found.items():
        label = "forward or other" if phase in (Phase.FORWARD, Phase.OTHER) else Phase(phase).label
        result[step, label] = max(result.get((step, label), 0), size)
    return result


def start_of(seen: Seen) -> int:
    return seen.line.start_bytes


def highest(seen: Seen) -> int:
    return worst(seen.trace, seen.line).bytes - start_of(seen)


class TestLight:
    @pytest.mark.parametrize("options", [
        {"max_events": 1}, {"steps": (2, 4)}, {"steps": (None, 1)}, {"steps": (5, None)},
    ])
    def test_it_is_as_exact_as_full(
        self, full: tuple[str, Seen], options: dict[str, object]
    ) -> None:
        name, whole = full
        light = record(RUNS[name], **options)
        levels = [Level(level) for level in light.trace["steps"]["level"]]
        assert Level.LIGHT in levels
        if "steps" in options:
            first, last = options["steps"]
            wanted = range(7)[slice(first, last)]
            assert [step for step, level in enumerate(levels) if level is Level.FULL] == list(wanted)

        assert light.steps == whole.steps == 7
        assert light.step_ends == whole.step_ends
        assert highest(light) == whole.peak
        assert merged(peaks(light)) == merged(peaks(whole))
        light.closes()

    def test_the_highest_steps_events_are_kept_and_their_ledger_closes(self, full: tuple[str, Seen]) -> None:
        name, whole = full
        light = record(RUNS[name], max_events=0)
        assert light.trace.peak_step is not None
        step = Seen(light.trace.peak_step)
        step.closes()
        assert step.line.peak_bytes - start_of(light) == whole.peak
        # It is the step that the full recording found, and in the same phase.
        rows = [r for r in step.spans(Kind.STEP)]
        at = whole.nest.step[whole._span(int((whole.life.born == whole.line.peak_event).argmax()))]
        assert [step.trace.text[step.trace["spans"]["name"][r]] for r in rows] == [
            whole.trace.text[whole.trace["spans"]["name"][at]]]

    def test_the_file_does_not_grow_with_the_events_of_light_steps(self) -> None:
        def tiny(steps: int) -> Callable[[], None]:
            def run() -> None:
                model = nn.Linear(3, 2)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for _ in range(steps):
                    optimizer.zero_grad()
                    model(torch.ones(4, 3)).sum().backward()
                    optimizer.step()
            return run

        short, long = record(tiny(200), max_events=500), record(tiny(2000), max_events=500)
        assert long.steps == 2000
        per_step = (long.file_bytes - short.file_bytes) / 1800
        assert per_step < 100  # a row for the step and for each of its phases; the events would be some 30 rows
        assert len(long.trace["allocations"]["event"]) < len(short.trace["allocations"]["event"]) + 20


class TestCuts:
    @pytest.mark.parametrize("name", ["gpt", "in parts"])
    def test_where_the_stream_is_cut_changes_nothing(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        run = in_parts if name == "in parts" else RUNS[name]
        whole = record(run)
        cuts: list[int] = []
        read = recorder.Recorder._read_chunk
        monkeypatch.setattr(recorder.Recorder, "_read_chunk", lambda self, *a: cuts.append(1) or read(self, *a))
        record(run)
        usual = len(cuts)
        monkeypatch.setattr(recorder, "_CUT_ANYWHERE", 20)
        monkeypatch.setattr(recorder, "_CUT_AT_STEP_END", 5)
        cut = record(run)
        if name == "in parts":
            assert len(cuts) - usual >= usual + 3 * 2 * 2  # also in the midst of steps, before a forward
        assert content(cut) == content(whole)
        assert cut.step_ends == whole.step_ends
        assert cut.peak == whole.peak
        assert peaks(cut) == peaks(whole)
        assert [cut.phases(step) for step in range(cut.steps)] == [whole.phases(step) for step in range(whole.steps)]
        cut.closes()
        for step in range(whole.steps):
            assert cut.saved(step) == whole.saved(step)
        assert module_calls(cut) == module_calls(whole)


def content(seen: Seen) -> Counter[tuple[object, ...]]:
    """Allocations by size, line, phase, role and modules around them."""
    spans, text = seen.trace["spans"], seen.trace.text
    found: Counter[tuple[object, ...]] = Counter()
    for row in range(len(seen.life.born)):
        if seen.life.born[row] == NONE:
            continue
        around = [text[spans["name"][a]] for a in seen.trace.ancestors(int(seen.trace["allocations"]["span"][row]))]
        found[int(seen.trace["allocations"]["bytes"][row]),
              seen.line_number(int(seen.trace["allocations"]["line"][row])), tuple(around),
              tuple(seen.role_of(row))] += 1
    return found


def module_calls(seen: Seen) -> list[tuple[str, int, int]]:
    """Name, call and how many memory events each module call encloses."""
    spans = seen.trace["spans"]
    return [(seen.trace.text[spans["name"][r]], int(spans["call"][r]),
             int(spans["end_event"][r] - spans["start_event"][r])) for r in seen.spans(Kind.MODULE)]
