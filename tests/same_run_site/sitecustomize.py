"""Writes down, when a process ends, what training left behind: parameters, buffers and random states.

Python imports this by itself when its folder is in PYTHONPATH, so a script needs no change. It is the same in the
bare and in the recorded run. Every process that created parameters, and the script's own process in any case, appends
one line of JSON to the file that SAME_RUN_STATE names.

Random numbers start from fixed seeds, for of a script that sets none no two runs could be compared.

Parameters are kept alive from their creation, for models that are local to a function are gone when a process ends.
So a run under this module is for comparing what is computed; it does not show the script's own memory.
"""

import atexit
import functools
import hashlib
import importlib.machinery
import json
import multiprocessing.process
import os
import random
import sys
from multiprocessing import util

parameters = []
buffers = []  # (module, name): a module may put another tensor in the place of a buffer


def keep_parameters(module):
    """Note every parameter that torch.nn.parameter makes, in the order of creation."""
    create = module.Parameter.__new__

    @functools.wraps(create)
    def create_and_keep(*args, **kwargs):
        parameter = create(*args, **kwargs)
        parameters.append(parameter)
        return parameter

    module.Parameter.__new__ = create_and_keep


def keep_buffers(module):
    """Note every buffer that a module registers."""
    register = module.Module.register_buffer

    @functools.wraps(register)
    def register_and_keep(self, name, *args, **kwargs):
        register(self, name, *args, **kwargs)
        buffers.append((self, name))

    module.Module.register_buffer = register_and_keep


def seed_numpy(module):
    module.seed(0)


def seed_torch(module):
    module.default_generator.manual_seed(0)


AFTER_IMPORT = {
    "torch.nn.parameter": keep_parameters,
    "torch.nn.modules.module": keep_buffers,
    "numpy.random": seed_numpy,
    "torch.random": seed_torch,
}


class AfterImport:
    """Calls a function of AFTER_IMPORT once its module has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name not in AFTER_IMPORT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_then_call(module):
                execute(module)
                AFTER_IMPORT[name](module)

            spec.loader.exec_module = execute_then_call
        return spec


def digest(tensor):
    """Shape, dtype and a hash of the bytes; tensors without plain bytes are named by what they are."""
    import torch

    facts = [list(tensor.shape), str(tensor.dtype)]
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return [*facts, f"{tensor.layout} on {tensor.device.type}"]
    with torch.no_grad():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return [*facts, hashlib.sha256(flat.numpy()).hexdigest()]


def hashed(value):
    return hashlib.sha256(repr(value).encode()).hexdigest()


def random_states():
    states = {"python": hashed(random.getstate())}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = hashed((name, keys.tobytes(), *rest))
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        states["torch"] = digest(torch.get_rng_state())
        if torch.cuda.is_initialized():
            states["cuda"] = [digest(state) for state in torch.cuda.get_rng_state_all()]
    return states


def write_state(path, main_process):
    if not main_process and not parameters:
        return
    kept = ((module, name, getattr(module, name, None)) for module, name in buffers)
    state = {
        "process": multiprocessing.process.current_process().name,
        "random": random_states(),  # first: nothing here may move them, and nothing does
        "parameters": [digest(parameter) for parameter in parameters],
        "buffers": [[type(module).__name__, name, *digest(b)] for module, name, b in kept if b is not None],
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(state) + "\n")


def forget():
    """A forked child starts with its parent's parameters, which are not its own work."""
    parameters.clear()
    buffers.clear()


if "SAME_RUN_STATE" in os.environ:
    state_file = os.environ["SAME_RUN_STATE"]
    random.seed(0)
    sys.meta_path.insert(0, AfterImport())
    atexit.register(write_state, state_file, os.getppid() == int(os.environ["SAME_RUN_PARENT"]))
    # Children of multiprocessing end without atexit, by way of its own finalizers.
    os.register_at_fork(after_in_child=forget)
    util.register_after_fork(util, lambda _: util.Finalize(None, write_state, (state_file, False), exitpriority=0))
