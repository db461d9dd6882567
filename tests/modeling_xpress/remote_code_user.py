"""A user without our package: what `test_remote_code.py` runs in a process of its own. Prints what it found as JSON."""

import importlib.util
import json
import logging
import shutil
import socket
import sys
from filecmp import cmpfiles
from pathlib import Path


def no_network(*args, **kwargs):
    raise OSError("this process has no network")


socket.socket.connect = socket.create_connection = socket.getaddrinfo = no_network

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer  # noqa: E402


HERE, COMMITS, ABSENT = Path(sys.argv[1]), sys.argv[2:4], sys.argv[4:]
warned = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warned.append(record.getMessage())
logging.getLogger("transformers").addHandler(handler)


def load(name, **kwargs):
    return AutoModel.from_pretrained(name, trust_remote_code=True, **kwargs)


def holds(model, folder: Path) -> bool:
    """Whether a model's tensors are those of a folder."""
    tensors = load_file(folder / "model.safetensors")
    state = model.state_dict()
    return state.keys() == tensors.keys() and all(torch.equal(state[name], tensors[name]) for name in tensors)


def drafts(model, **kwargs) -> dict:
    """A greedy text with and without the drafter, and what the drafter did for it."""
    n = {"max_new_tokens": 30, "do_sample": False}
    assisted = target.generate(ids, assistant_model=model, return_dict_in_generate=True, **n, **kwargs)
    return {
        "same text": torch.equal(assisted.sequences, target.generate(ids, **n)),
        "rounds": len(assisted.drafting.rounds),
        "accepted": assisted.drafting.accepted,
    }


def differing(a: Path, b: Path) -> list[str]:
    names = {path.name for path in [*a.iterdir(), *b.iterdir()]}
    _, mismatch, errors = cmpfiles(a, b, sorted(names), shallow=False)
    return mismatch + errors


found = {"importable": [name for name in ABSENT if importlib.util.find_spec(name)]}
target, tokenizer = AutoModelForCausalLM.from_pretrained("org/target"), AutoTokenizer.from_pretrained("org/target")
ids = tokenizer("w1 w2 w3 w4 w5 w6", return_tensors="pt").input_ids

# By id: each commit's weights with its own code.
for commit in COMMITS:
    model = load("org/drafter", revision=commit)
    code = sys.modules[type(model).__module__]
    found[commit] = {
        "class": type(model).__name__,
        "from the cache": code.__name__.startswith("transformers_modules"),
        "weights": holds(model, HERE / "hub" / "models--org--drafter" / "snapshots" / commit),
        "marked": hasattr(code, "MARK"),
    }
model = load("org/drafter", revision=COMMITS[0])
found["generates"] = drafts(model)
torch.manual_seed(0)
sampled = target.generate(ids, assistant_model=model, max_new_tokens=30, do_sample=True, num_passes=1)
found["sampled"] = sampled.shape[1] - ids.shape[1]

# Saved again, moved, loaded, saved again: always the same folder.
first = HERE / "hub" / "models--org--drafter" / "snapshots" / COMMITS[0]
model.save_pretrained(HERE / "second")
found["second generation differs in"] = differing(first, HERE / "second")
shutil.move(HERE / "second", HERE / "moved" / "and-renamed.v2")
moved = HERE / "moved" / "and-renamed.v2"
config = AutoConfig.from_pretrained(moved, trust_remote_code=True)
found["config"] = [type(config).__name__, config.target_layer_ids]
found["from config"] = type(AutoModel.from_config(config, trust_remote_code=True)).__name__
model = load(moved)
found["moved"] = {"weights": holds(model, first), **drafts(model)}
model.save_pretrained(HERE / "third")
found["third generation differs in"] = differing(first, HERE / "third")

# As released, with our code put beside it.
found["warned before"], warned[:] = list(warned), []
model = load(HERE / "released")
found["released"] = {"class": type(model).__name__, "warned": list(warned), **drafts(model, num_passes=1)}

found["ours imported"] = sorted(name for name in sys.modules if name.split(".")[0] in ABSENT)
print(json.dumps(found))
