"""Graphs that a script keeps from step to step show in the report of a real run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recording import record
from torch import nn

import memdiag
from memdiag.errors import MemdiagError
from memdiag.report import render_text, summarize


def test_what_earlier_steps_saved_is_told_apart() -> None:
    # GIVEN a training that keeps the loss of every step with its graph: tanh's output, 64 x 1000 floats a step
    kept: list[torch.Tensor] = []

    def train() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 1000), nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            loss = model(torch.randn(64, 10)).sum()
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            optimizer.step()
            kept.append(loss)

    # WHEN it is recorded
    summary = summarize(record(train).trace)
    kept.clear()
    # THEN the peak is in the last step, over the graphs of the five before it
    assert summary.peak.step == 5
    assert summary.saved_earlier_bytes == 5 * 64 * 1000 * 4
    assert "Saved in earlier steps and still alive at the peak: 1.2 MiB" in render_text(summary)


def test_a_training_that_keeps_nothing_says_nothing_of_it() -> None:
    # GIVEN an ordinary training
    def train() -> None:
        model = nn.Sequential(nn.Linear(10, 1000), nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            model(torch.randn(64, 10)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    # WHEN it is recorded, THEN no graph is older than the step of the peak
    summary = summarize(record(train).trace)
    assert summary.saved_earlier_bytes == 0
    assert "earlier steps" not in render_text(summary)


def test_two_recordings_at_once_are_refused(tmp_path: Path) -> None:
    # GIVEN a recording, WHEN another begins inside it, THEN it is refused, and the first goes on
    with memdiag.profile(tmp_path / "a.mdiag") as outer:
        with pytest.raises(MemdiagError, match="recorded already"), memdiag.profile(tmp_path / "b.mdiag"):
            pass
        torch.ones(1000)
    assert outer.problem is None
    assert not (tmp_path / "b.mdiag").exists()
