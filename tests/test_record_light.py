"""Light recording, and cuts of the stream, against the same run recorded in full and in one piece."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from recording import GPT, Seen, convnet, mark, mlp, record
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from memdiag import policy
from memdiag.record import gathering, recorder
from memdiag.record.hooks.saves import Saves
from memdiag.trace import NONE, Kind, Level, Phase, Role
from memdiag.trace.ledger import ledger
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
        monkeypatch.setitem(gathering._ANYWHERE, Level.FULL, 80)
        monkeypatch.setitem(gathering._AT_STEP_END, Level.FULL, 20)
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


class TestRests:
    """In light recording, of steps that do the same only some have their saved tensors noted."""

    @staticmethod
    def growing(
        batch: int = 4, length: int = 8, extra: bool = False, stop: bool = False, leak: int = 99
    ) -> Callable[[], None]:
        """Equal steps, each of which leaves something behind, so that the last is the highest.

        Args:
            batch, length: of the last.
            leak: from here on graphs are kept.
            extra: the last allocates something more.
            stop: it ends in its forward.
        """
        def run() -> None:
            torch.manual_seed(0)
            model, kept = GPT(), []
            optimizer = torch.optim.Adam(model.parameters(), foreach=False)
            for step in range(16):
                if extra and step == 15:
                    kept.append(mark(1_003))
                logits = model(torch.randint(50, (batch, length) if step == 15 else (4, 8)))
                kept.append(logits[:, 0].clone() if step >= leak else logits.detach()[:, 0].clone())
                if stop and step == 15:
                    break
                logits.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return run

    @staticmethod
    def at_peak(seen: Seen) -> dict[str, int]:
        """Bytes of each role at the peak of the highest light step."""
        assert seen.trace.peak_step is not None
        step = Seen(seen.trace.peak_step)
        step.closes()
        sums = ledger(step.trace, step.roles, "cpu")[:, step.line.peak_event]
        return {role.name: int(sums[role]) for role in Role if sums[role]}

    @pytest.fixture
    def packs(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """One entry for each tensor that was noted."""
        noted: list[int] = []
        note = Saves._note
        monkeypatch.setattr(Saves, "_note", lambda self, tensor: noted.append(1) or note(self, tensor))
        return noted

    @pytest.mark.parametrize("how", [
        {}, {"batch": 9}, {"stop": True}, {"batch": 9, "stop": True}, {"length": 32}, {"extra": True}, {"leak": 10}])
    def test_roles_are_as_if_every_step_was_watched(
        self, how: dict[str, Any], packs: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # GIVEN a run of which the highest step is no multiple of those that are watched
        assert 15 % policy.WATCHED_LIGHT_STEPS
        # WHEN it is recorded in light with and without rests
        rested = record(self.growing(**how), steps=(0, 1))
        few = len(packs)
        with monkeypatch.context() as all_watched:
            all_watched.setattr(policy, "WATCHED_LIGHT_STEPS", 1)
            watched = record(self.growing(**how), steps=(0, 1))
        # THEN much fewer tensors were noted, and the same was said of them
        assert few < 0.6 * (len(packs) - few)
        said, wanted = self.at_peak(rested), self.at_peak(watched)
        if "extra" in how:  # nobody has noted that the model's result was saved too: its variable explains it
            logits = 4 * 8 * 50 * 4
            wanted["SAVED_ACTIVATIONS"] -= logits
            wanted["HELD"] += logits
        if how == {"batch": 9, "stop": True}:  # the result would have been saved by what comes next
            logits = wanted.pop("OTHER_ACTIVATIONS")
            assert logits == 9 * 8 * 50 * 4
            wanted["SAVED_ACTIVATIONS"] += logits
        assert said == wanted
        assert self.at_peak(rested)["SAVED_ACTIVATIONS"] > 0
        assert rested.step_ends == watched.step_ends

    def test_steps_in_full_between_them(self, packs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        # GIVEN a run recorded in full
        whole = record(self.growing())
        every = len(packs)
        # WHEN some of its steps are, and light ones rest before and after
        packs.clear()
        mixed = record(self.growing(), steps=(7, 10))
        # THEN the full steps are as in the other, and few tensors were noted in the rest
        assert 3 / 16 * every < len(packs) < 0.8 * every
        for step in range(7, 10):
            assert mixed.phases(step) == whole.phases(step)
            assert mixed.saved(step) == whole.saved(step)
        assert mixed.step_ends == whole.step_ends
        mixed.closes()
        monkeypatch.setattr(policy, "WATCHED_LIGHT_STEPS", 1)
        assert self.at_peak(mixed) == self.at_peak(record(self.growing(), steps=(7, 10)))

    def test_steps_that_differ_are_all_watched(self, packs: list[int]) -> None:
        record(RUNS["gpt"], steps=(0, 2))
        light = len(packs)
        packs.clear()
        record(RUNS["gpt"], max_events=10**9)
        assert light == len(packs)

    @staticmethod
    def training() -> tuple[Callable[..., None], list[float]]:
        """A step of a perceptron, with a context to put around its backward and its optimizer; and its losses."""
        torch.manual_seed(0)
        model, losses = mlp(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(around: AbstractContextManager[Any] | None = None) -> None:
            loss = model(torch.ones(3, 20)).square().mean()
            with around or nullcontext():
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

        return step, losses

    def test_a_scripts_own_hooks_are_left_in_peace(self) -> None:
        """Around a step, around a step's end, and around many steps."""
        def losses() -> list[float]:
            step, found = self.training()
            calls = []

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                calls.append(1)
                return tensor.clone()

            for round_ in range(8):
                for _ in range(3):
                    step()
                with saved_tensors_hooks(pack, lambda tensor: tensor):
                    for _ in range(1 + round_ % 3):
                        step()
                    found.append(len(calls))
                step(saved_tensors_hooks(pack, lambda tensor: tensor))
                found.append(len(calls))
            return found

        bare, seen = losses(), []
        light = record(lambda: seen.extend(losses()), steps=(0, 1))
        assert seen == bare
        assert light.steps > 24
        # Nobody's hooks are left over.
        with pytest.raises(RuntimeError, match="stack"):
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def test_hooks_that_the_script_forbids_are_not_put_back(self) -> None:
        def losses() -> list[float]:
            step, found = self.training()
            for _ in range(10):
                step()
            with disable_saved_tensors_hooks("not here"):
                for _ in range(9):
                    step()
            for _ in range(10):
                step()
            return found

        bare, seen = losses(), []
        light = record(lambda: seen.extend(losses()), steps=(0, 1))
        assert seen == bare
        assert light.steps == 29

    def test_hooks_of_the_script_around_the_end_of_a_step_delay_ours_to_the_next_forward(self) -> None:
        def run() -> None:
            step, _ = self.training()
            for number in range(12):
                step(saved_tensors_hooks(lambda t: t, lambda t: t) if number == 9 else None)

        # GIVEN a step in full after one that rested / WHEN the script's hooks were there in between
        mixed = record(run, steps=(10, 12))
        # THEN it has its saves all the same
        assert mixed.saved(10) == mixed.saved(11)
        assert mixed.saved(10)

    def test_a_change_in_place_is_still_an_error(self) -> None:
        told: list[int] = []

        def run() -> None:
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(20):
                out = model(torch.ones(3, 20)).exp()
                if step > 10:
                    out.add_(1)
                    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                        out.sum().backward()
                    told.append(step)
                else:
                    out.sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        record(run, steps=(0, 1))
        assert told == list(range(11, 20))
