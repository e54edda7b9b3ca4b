"""The case collection varied: its scripts with other sizes, with other names, and with what keeps moved elsewhere.

A verdict rests on what a run does. So none of these may change it, save where another role then has most of the peak:
such cases are listed with the reason.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import same_run

# What holds a size, with the size in braces: it is doubled and halved. Files other than the script come before a colon.
BATCH: dict[str, list[str]] = {
    "c01": ["torch.rand({4}, 3"],
    "c03": ["torch.randn({8}, 3", "({8}, 160, 160)"],
    "c05": ["batch_size={128}", "batch_size={1024}"],
    "c06": ["= 200, {64}, 16"],
    "c08": ["torch.randn({8}, 64", "({8},)"],
    "c10": ["torch.randn({32}, 512"],
    "c12": ["torch.randn({64}, 256", "({64},)"],
    "c13": ["torch.randn({16}, 1024", "({16},)"],
    "c14": ["= 400_000, 64, {128}"],
    "c15": ["({1}, 768)"],
    "c17": ["torch.randn({1024}, 192"],
    "c19": ["torch.randn({32}, 512", "({32},)"],
    "c20": ["batch_size={16}"],
    "c22": ["torch.randn({1024}, 512", "torch.randn({1024}, 1,"],
    "c23": ["torch.randn({1024}, 300", "({1024},)"],
    "c24": ["for i in range({4})"],
    "c26": ["torch.randn({16}, 3", "({16},)"],
    "c27": ["torch.randn({16}, 3", "({16},)"],
    "c28": ["({3}, 256)"],
    "c29": ["batch_size={16}", "CachedImages({128})"],  # as many steps: the process is judged from eight on
    "c31": ["torch.randn({256}, 128", "({256},)"],
    "c32": ["({4}, 320)", "({4},)"],
    "c34": ["torch.randn({16}, 1536", "torch.randn({16}, 8"],
    "c35": ["({6}, 256)"],
    "c37": ["({16}, 12)", "({16},)"],
    "c38": ["torch.rand({8}, 3"],
    "c39": ["torch.randn({2048}, 64"],
    "c41": ["torch.rand({64}, 2"],
    "c42": ["n={1024}", "task({128})"],
    "c44": ['"--batch-size", type=int, default={2}'],
    "c45": ['c45_config.json:"batch": {1024}'],
    "c47": ["train_batch_size={8}", "eval_batch_size={16}"],
    "c48": ["batch_size={32}"],
    "c50": ["torch.randn({1024}, 64", "({1024},)"],
    "c51": ["torch.randn({64}, 64", "({64},)"],
    "c53": ["torch.rand({8}, 3"],
    "c55": ["torch.randn({32}, 1024", "({32},)", "torch.randn({32}, device"],
}
LENGTH: dict[str, list[str]] = {
    "c06": ["= 200, 64, {16}"],
    "c08": ["torch.randn(8, {64}, 32"],
    "c14": ["(BATCH, {20})"],
    "c15": ["n_positions={768}", "(1, {768})"],
    "c24": ["[{60}, {80}, {70}, {110}, {90}, {480}, 75, {100}]"],
    "c28": ["n_positions={256}", "(3, {256})"],
    "c32": ["(4, {320})"],
    "c35": ["(6, {256})"],
    "c37": ["(16, {12})"],
    "c47": ["= 4000, {64}"],
    "c48": ["torch.randn(512, {96}, 48)"],
}

# Whole words: variables, attributes, functions and classes of the script's own.
NAMES: dict[str, dict[str, str]] = {
    "c01": {"clean_log": "seen", "clean_loss": "q", "Denoiser": "Smoother", "main": "go", "model": "machine"},
    "c03": {"EpochIoU": "Overlap", "preds": "first", "targets": "second", "update": "take", "metric": "judge"},
    "c05": {"curve": "points", "validate": "look", "total": "amount", "loader": "source", "make_model": "build"},
    "c06": {"hidden": "h", "StreamGRU": "Reader", "logits": "scores", "model": "machine", "outs": "results"},
    "c08": {"total": "amount", "Encoder": "Net", "ACCUM": "PARTS", "model": "machine"},
    "c10": {"model": "machine", "optimizer": "mover", "loss": "q"},
    "c12": {"snapshots": "drawer", "averaged": "mixed", "run": "go", "model": "machine", "best": "few"},
    "c13": {"MasterAdam": "Mover", "master": "wide", "m": "first", "v": "second", "optimizer": "mover"},
    "c14": {"TwoTower": "Net", "items": "table", "model": "machine", "history": "past"},
    "c15": {"model": "machine", "tokens": "words", "optimizer": "mover"},
    "c17": {"contrastive_loss": "measure", "sim": "s", "weights": "w", "prob": "p", "encoder": "net"},
    "c19": {"grad_sum": "collected", "previous": "before", "params": "parts", "agreement": "match"},
    "c20": {"batches": "pieces", "Frames": "Pictures", "loader": "source", "model": "machine"},
    "c22": {"skipped": "notes", "err": "problem", "training_step": "advance", "main": "go", "Net": "Machine"},
    "c23": {"bank": "store", "bank_labels": "store_kinds", "Embedder": "Net", "model": "machine", "z": "e"},
    "c24": {"LENGTHS": "SIZES", "Encoder": "Net", "Block": "Part", "att": "a", "model": "machine"},
    "c26": {"ResNet18": "Net", "BasicBlock": "Part", "images": "x", "layer1": "one", "layer2": "two", "main": "go"},
    "c27": {"ViT": "Net", "blocks": "parts", "head": "top", "model": "machine"},
    "c28": {"model": "machine", "ids": "words", "optimizer": "mover"},
    "c29": {"CachedImages": "Pictures", "cache": "kept", "decode": "read", "key": "k", "main": "go"},
    "c31": {"sensitivity": "bend", "probe": "twin", "build": "make", "main": "go", "model": "machine"},
    "c32": {"Attention": "Mix", "last_scores": "a", "last_weights": "b", "Model": "Net", "tokens": "words"},
    "c34": {"net": "inner", "main": "go", "model": "machine"},
    "c35": {"LoRALinear": "Thin", "add_lora": "wrap", "trainable": "free", "ids": "words"},
    "c37": {"TiedLM": "Net", "rnn": "cell", "tokens": "words", "optimizer": "mover"},
    "c38": {"AutoEncoder": "Net", "scaler": "factor", "recon": "out", "block": "part"},
    "c39": {"ResidualMLP": "Net", "step_model": "machine", "blocks": "parts"},
    "c41": {"closure": "again", "points": "places", "net": "machine"},
    "c42": {"Regressor": "Net", "adapt": "move", "fast": "moved", "meta_loss": "outer", "inner_steps": "turns"},
    "c44": {"args": "chosen", "main": "go", "model": "machine"},
    "c45": {"teacher": "large", "student": "small", "t_logits": "a", "s_logits": "b", "kd": "k"},
    "c47": {"RandomTokens": "Words", "token_accuracy": "judge", "trainer": "runner", "main": "go"},
    "c48": {"encoder": "part", "running": "sum_", "logits": "scores", "accelerator": "helper", "main": "go"},
    "c50": {"hardest": "pick", "diff": "d", "dist": "far", "embeddings": "z", "model": "machine"},
    "c51": {"model": "machine", "total": "amount", "main": "go", "criterion": "measure"},
    "c53": {"EMAQuantizer": "Picker", "codebook": "table", "VQAE": "Net", "commit": "tie", "recon": "out"},
    "c55": {"policy": "machine", "advantage": "worth", "optimizer": "mover"},
}

# What keeps is moved into a function or a class of its own: the changes, and the statement that keeps it then.
MOVED: dict[str, tuple[list[tuple[str, str]], str]] = {
    "c01": ([("def main(", "def note(store, value):\n    store.append(value)\n\n\ndef main("),
             ("clean_log.append(clean_loss)", "note(clean_log, clean_loss)")], "store.append(value)"),
    "c03": ([("class EpochIoU", "def put(into, what):\n    into += [what]\n\n\nclass EpochIoU"),
             ("self.preds.append(probs.detach())", "put(self.preds, probs.detach())")], "into += [what]"),
    "c05": ([("def main(", "class Journal:\n    def __init__(self):\n        self.rows = []\n\n"
              "    def add(self, row):\n        self.rows.append(row)\n\n\ndef main("),
             ("curve = []", "journal = Journal()\n    curve = journal.rows"), ("curve.append(", "journal.add(")],
            "self.rows.append(row)"),
    "c06": ([("hidden = torch.zeros(", "class Carry:\n    hidden = None\n\n\ncarry = Carry()\n"
              "carry.hidden = torch.zeros("),
             ("logits, hidden = model(seq[:, :-1], hidden)",
              "logits, carry.hidden = model(seq[:, :-1], carry.hidden)")], "logits, carry.hidden ="),
    "c12": ([("def run(", "def remember(store, score, net):\n    store.append((score, copy.deepcopy(net.state_dict())))"
              "\n\n\ndef run("),
             ("snapshots.append((loss.item(), copy.deepcopy(model.state_dict())))",
              "remember(snapshots, loss.item(), model)")], "store.append((score"),
    "c22": ([("def main(", "class Log:\n    def __init__(self):\n        self.lines = {}\n\n"
              "    def add(self, step, problem):\n        self.lines[step] = problem\n\n\ndef main("),
             ("skipped = []", "log = Log()"), ("skipped.append((step, err))", "log.add(step, err)"),
             ("in skipped", "in log.lines.items()")], "self.lines[step] = problem"),
    "c23": ([("bank = torch.empty(0, 256, device=device)",
              "class Memory:\n    def __init__(self):\n        self.all = torch.empty(0, 256, device=device)\n\n"
              "    def add(self, new):\n        self.all = torch.cat([self.all, new])\n\n\nmemory = Memory()"),
             ("len(bank)", "len(memory.all)"), ("bank.detach()", "memory.all.detach()"),
             ("bank = torch.cat([bank, model(x)])", "memory.add(model(x))")], "self.all = torch.cat("),
    "c29": ([("class CachedImages", "def store(into, key, image):\n    into[key] = image\n\n\nclass CachedImages"),
             ("self.cache[key] = np.ascontiguousarray(img[:, :, ::-1]) if flip else img",
              "store(self.cache, key, np.ascontiguousarray(img[:, :, ::-1]) if flip else img)")], "into[key] = image"),
    "c31": ([("def sensitivity(", "def differentiate(value):\n    value.backward(create_graph=True)\n\n\n"
              "def sensitivity("),
             ("    loss.backward(create_graph=True)", "    differentiate(loss)")], "value.backward(create_graph=True)"),
    "c47": ([("def main():", "def start(runner):\n    runner.train()\n\n\ndef main():"),
             ("trainer.train()", "start(trainer)")], "runner.train()"),
}

# Cases whose class is another one on some machines, or (with the variation's name) when varied: the class, and why.
OTHERS: dict[str, tuple[str, str]] = {
    "c38": ("workspace", "oneDNN takes for bfloat16 convolutions what suits the processor: the peak may be 116 MB, "
                         "61 MiB of it workspace and 48 MiB activations, where the collection's machine had 73 MB"),
}


@dataclass(frozen=True)
class Variation:
    """Changes to a case's script, or to a file beside it.

    Attributes:
        changes: (file or "" for the script, pattern, replacement); each pattern must be there.
        keeps: text of the statement that keeps a leak then; None where it is the one that it was.
    """

    name: str
    changes: list[tuple[str, re.Pattern[str], str]]
    keeps: str | None = None


def variations(case_id: str) -> list[Variation]:
    """Those of a case. A size that cannot be halved is only doubled."""
    found = []
    for what, table in (("batch", BATCH), ("length", LENGTH)):
        for factor in (2.0, 0.5):
            sizes = [float(size) for text in table.get(case_id, []) for size in re.findall(r"\{(\d+)\}", text)]
            if sizes and all((size * factor).is_integer() for size in sizes):
                found.append(Variation(f"{what} x{factor:g}", [_scaled(text, factor) for text in table[case_id]]))
    if case_id in NAMES:
        found.append(Variation("names", [
            ("", re.compile(rf"\b{old}\b"), new) for old, new in NAMES[case_id].items()]))
    if case_id in MOVED:
        changes, keeps = MOVED[case_id]
        found.append(Variation("moved", [("", re.compile(re.escape(old)), new) for old, new in changes], keeps))
    return found


def _scaled(text: str, factor: float) -> tuple[str, re.Pattern[str], str]:
    file, _, text = text.rpartition(".json:")
    old = re.sub(r"\{(\d+)\}", r"\1", text)
    new = re.sub(r"\{(\d+)\}", lambda size: str(int(int(size[1]) * factor)), text)
    return file and f"{file}.json", re.compile(re.escape(old)), new


@contextlib.contextmanager
def varied(case: dict[str, Any], folder: Path, variation: Variation) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A copy of a case with a variation made.

    Returns:
        The script, and the case as it then is: with the lines that keep it where they have moved to.

    Raises:
        SameRunError: something to change is not there.
    """
    script = Path(case["script"])
    with tempfile.TemporaryDirectory(prefix="memdiag-varied-") as copy:
        shutil.copytree(folder / script.parent, Path(copy, script.parent))
        before = Path(copy, script).read_text(encoding="utf-8")
        for name, pattern, new in variation.changes:
            file = Path(copy, script.parent, name) if name else Path(copy, script)
            text = file.read_text(encoding="utf-8")
            changed = pattern.sub(lambda _, new=new: new, text)  # type: ignore[misc]
            if changed == text:
                raise same_run.SameRunError(f"{case['id']}: {pattern.pattern!r} is not in {file.name}")
            file.write_text(changed, encoding="utf-8")
        after = Path(copy, script).read_text(encoding="utf-8")
        yield Path(copy, script), {**case, **_moved(case, before, after, variation.keeps)}


def _moved(case: dict[str, Any], before: str, after: str, keeps: str | None) -> dict[str, Any]:
    """Where the statements that keep a leak have gone."""
    if case["leak_location"] is None:
        return {}
    file = Path(case["script"]).name
    if keeps is not None:
        found = [number for number, line in enumerate(after.splitlines(), 1) if keeps in line]
    elif before.count("\n") == after.count("\n"):
        return {}
    else:
        raise same_run.SameRunError(f"{case['id']}: lines have moved, and nothing says where to")
    return {"leak_location": f"{file}:{found[0]}", "leak_location_alt": [f"{file}:{line}" for line in found[1:]]}


def expected(case: dict[str, Any], variation: Variation) -> dict[str, Any]:
    """The case with the class that it may have besides."""
    others = [OTHERS[key][0] for key in (case["id"], f"{case['id']} {variation.name}") if key in OTHERS]
    return {**case, "acceptable_classes": [*case["acceptable_classes"], *others]}
