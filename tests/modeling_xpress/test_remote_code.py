"""A published folder's code, for users who have torch and transformers alone: what it is, and that it runs.

The run is one process of its own (`remote_code_user.py`): without network, without our package and those that only our
package needs, with an empty module cache and a Hub cache of the layout that a download leaves.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import agreeing_pair, edit_config
from rig import VOCAB
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from xpress_drafter.generation.drafter_xpress import code_files, write_code
from xpress_drafter.hub_cards.converters import export_released
from xpress_drafter.modeling_xpress.configuration_xpress import AUTO_MAP


ABSENT = ["xpress_drafter", "accelerate", "datasets", "matplotlib", "peft", "pytest", "rich", "scipy", "typer"]
COMMITS = ["a" * 40, "b" * 40]
THIRD_PARTY = {"torch", "transformers", "huggingface_hub", "safetensors"}


# What the code is.


@pytest.mark.parametrize("name", sorted(code_files()))
def test_imports(name):
    """At the top of the file alone, unguarded: siblings that lie there too, and what Transformers itself needs."""
    tree = ast.parse(code_files()[name])
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports and all(node in tree.body for node in imports)
    for node in imports:
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 and f"{node.module}.py" in code_files(), ast.unparse(node)
        else:
            modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            tops = {module.split(".")[0] for module in modules}
            assert tops <= THIRD_PARTY | sys.stdlib_module_names, ast.unparse(node)


def test_files_hold_the_auto_classes_and_no_room_that_users_do_not_need():
    files = code_files()
    for reference in AUTO_MAP.values():
        module, name = reference.split(".")
        assert f"class {name}(" in files[f"{module}.py"]
    assert {"refiner_xpress.py", "decoding_xpress.py", "jacobi_xpress.py"} <= files.keys()
    assert not {"blocks.py", "objective.py", "converters.py", "__init__.py"} & files.keys()


# That it runs.


def site_without(packages: list[str], folder: Path) -> Path:
    """The installed packages, but for some: a folder of links to put on a path of its own."""
    folder.mkdir()
    linked = set()
    for site in (Path(entry) for entry in sys.path if any(Path(entry).glob("*.dist-info"))):
        for path in site.iterdir():
            package = path.name.split("-")[0] if path.suffix == ".dist-info" else path.name
            if path.suffix != ".pth" and not package.lower().startswith(("__editable__", *packages)):
                if (package, path.suffix) not in linked:  # the first on the path counts
                    linked.add((package, path.suffix))
                    (folder / path.name).symlink_to(path)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What the user without our package found."""
    here = tmp_path_factory.mktemp("user")
    target, drafter = agreeing_pair()
    repositories = {name: here / "hub" / f"models--org--{name}" for name in ("drafter", "target")}
    for commit in COMMITS:
        drafter.save_pretrained(repositories["drafter"] / "snapshots" / commit)
        drafter.fc.weight.data += 1  # the next commit's
    with (repositories["drafter"] / "snapshots" / COMMITS[1] / "drafter_xpress.py").open("a") as file:
        file.write("MARK = 'of the second commit'\n")
    target.save_pretrained(repositories["target"] / "snapshots" / COMMITS[0])
    tokenizer().save_pretrained(repositories["target"] / "snapshots" / COMMITS[0])
    for name, commit in (("drafter", COMMITS[1]), ("target", COMMITS[0])):
        (repositories[name] / "refs").mkdir()
        (repositories[name] / "refs" / "main").write_text(commit)
    export_released(drafter, here / "released")
    edit_config(here / "released", auto_map=AUTO_MAP, xpress_topc=None)
    write_code(here / "released")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(site_without(ABSENT, here / "site")),
        "HF_HOME": str(here / "home"),
        "HF_HUB_CACHE": str(here / "hub"),
        "HF_MODULES_CACHE": str(here / "modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    script = shutil.copy(Path(__file__).with_name("remote_code_user.py"), here)
    command = [sys.executable, "-S", script, here, *COMMITS, *ABSENT]
    run = subprocess.run(command, cwd=here, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    print(run.stdout)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_that_user_has_neither_our_package_nor_its_other_requirements(found):
    assert found["importable"] == [] and found["ours imported"] == []


@pytest.mark.parametrize("number, commit", list(enumerate(COMMITS)))
def test_code_and_weights_are_of_the_same_commit(found, number, commit):
    expected = {"class": "XPressDrafterModel", "from the cache": True, "weights": True, "marked": number == 1}
    assert found[commit] == expected


def test_it_generates(found):
    """The same text, and drafts accepted by the round: K = B - 1 passes make all of this pair's drafts right."""
    assert found["generates"]["same text"] and found["sampled"] == 30
    assert found["generates"]["accepted"] >= 5 * (found["generates"]["rounds"] - 1) > 0


def test_saving_again_gives_the_same_folder(found):
    """Tensors, config and code, byte for byte, from wherever it was loaded."""
    assert found["second generation differs in"] == [] and found["third generation differs in"] == []


def test_a_moved_folder_loads(found):
    assert found["config"] == ["XPressDrafterConfig", [0, 2]] and found["from config"] == "XPressDrafterModel"
    assert found["moved"]["weights"] and found["moved"]["same text"] and found["moved"]["accepted"] > 0


def test_nothing_is_warned_of(found):
    assert found["warned before"] == []


def test_released_config_with_our_code_beside_it(found):
    """Qwen3's name in the config, ours in `auto_map`; bf16 weights beside an fp32 target."""
    released = found["released"]
    assert (released["class"], released["warned"]) == ("XPressDrafterModel", [])
    assert released["same text"] and released["accepted"] > 0
