"""The ways to generate that `xpress eval` compares, and one measured call of any of them.

Every arm is watched alike: hooks note the length and the time of each target forward, so that the prompt's forward can
be told from the rest. Our own arms report their rounds themselves; those in Transformers' loops are read off the loop,
which hands a streamer the tokens of each forward. The prompt's forward is no round: a call makes
`first_tokens + accepted + len(rounds)` tokens, where `first_tokens` is 1 unless the arm drafts before it too, as prompt
lookup and autoregressive assistants do.
"""

import hashlib
import json
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from .evaluation import PLAIN
from .statistics_xpress import Round, track_drafting


OWN_ARMS = ("k0", "xpress", "xpress-lookup", "markov", "dflash")
ARM_NAMES = ("lookup", "native-dflash", *OWN_ARMS, "assistant")
DEFAULT_PASSES = (1, 2, 4, 6)
LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Arm:
    """One way to generate: what `generate` is given. `own` arms are decoded by our loop, which reports its rounds."""

    name: str
    arguments: dict = field(default_factory=dict)
    own: bool = False
    passes: int | None = None  # Jacobi passes K, where the arm has them

    @property
    def clocked(self) -> list[nn.Module]:
        """The models whose forwards are the drafting, as far as nobody else reports it."""
        return [] if self.own or "assistant_model" not in self.arguments else [self.arguments["assistant_model"]]


@dataclass
class ArmRun:
    """One call. Seconds are those of the whole call; those before the prompt's forward ended are `prefill_seconds`."""

    new_ids: list[int]
    prompt_hash: str  # of the tokens that the target was given
    seconds: float
    prefill_seconds: float
    first_tokens: int
    rounds: list[Round]
    split: dict[
        str, float
    ]  # seconds of "draft", "refine" and "verify" behind the prompt's forward; beside them is the rest

    def as_dict(self) -> dict:
        return {
            "prompt": self.prompt_hash,
            "tokens": len(self.new_ids),
            "first_tokens": self.first_tokens,
            "rounds": [list(r) for r in self.rounds],
            "seconds": self.seconds,
            "prefill_seconds": self.prefill_seconds,
            "split": self.split,
        }


def digest(tokens: list) -> str:
    """What token ids, of one prompt or of many, are recognised by."""
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def check_arms(arms: list[str], configs: dict) -> None:
    """
    Raises for arms that these models cannot run.

    Args:
        arms: Of `ARM_NAMES`.
        configs: By role ("drafter", "markov", "dflash", "assistant"), the configs of the models that were given.
    """
    unknown = sorted(set(arms) - set(ARM_NAMES))
    if unknown:
        raise ValueError(f"`--arms` names {unknown}, expected some of {', '.join(ARM_NAMES)} (plain always runs).")
    needed = dict.fromkeys(("native-dflash", "k0", "xpress", "xpress-lookup"), "drafter")
    needed |= {role: role for role in ("markov", "dflash", "assistant")}
    for arm in arms:
        if arm in needed and needed[arm] not in configs:
            raise ValueError(
                f"`--arms` names {arm!r} without `--{needed[arm]}`, expected that model: give it, or leave the arm out."
            )
    unused = sorted(set(configs) - {needed[arm] for arm in arms if arm in needed})
    if unused:
        raise ValueError(f"`--{unused[0]}` was given, but no arm of {arms} uses it: leave it out, or add its arm.")
    refiners = {"k0": "xpress", "xpress": "xpress", "xpress-lookup": "xpress", "markov": "markov", "dflash": None}
    for arm in arms:
        if arm in refiners and (found := configs[needed[arm]].refiner_type) != refiners[arm]:
            raise ValueError(
                f"the arm {arm!r} needs a drafter whose refiner is {refiners[arm]!r}, but that of `--{needed[arm]}` is "
                f"{found!r}: give another folder, or choose `--arms` without it."
            )


def choose_passes(passes: list[int] | None, num_draft_tokens: int) -> list[int]:
    """The K to run beside the fixed point B - 1; some usual ones where none were asked for."""
    if passes is None:
        return [k for k in DEFAULT_PASSES if k < num_draft_tokens]
    wrong = [k for k in passes if not 1 <= k < num_draft_tokens]
    if wrong:
        raise ValueError(
            f"`--passes` has {wrong}, expected 1 to {num_draft_tokens - 1} with this drafter: {num_draft_tokens} is its fixed "
            "point, which runs anyway, and 0 is the arm k0."
        )
    return sorted(set(passes))


def make_arms(
    arms: list[str],
    models: dict[str, nn.Module],
    passes: list[int],
    tokenizers: dict | None = None,
    confidence_threshold: float | None = None,
) -> list[Arm]:
    """
    Plain first, then the arms asked for, in the order of `ARM_NAMES`.

    Args:
        models: By role, as in `check_arms`.
        passes: K of the arm xpress.
        tokenizers: `generate`'s `tokenizer` and `assistant_tokenizer`, for an assistant of another vocabulary.
        confidence_threshold: Of our own arms; each drafter's own where omitted.
    """
    made = [Arm(PLAIN)]
    for arm in (name for name in ARM_NAMES if name in arms):
        if arm == "lookup":
            made.append(Arm("prompt lookup", {"prompt_lookup_num_tokens": LOOKUP_TOKENS}))
        elif arm == "native-dflash":
            arguments = {"assistant_model": models["drafter"], "speculation_type": "dflash"}
            made.append(Arm("DFlash in Transformers", arguments))
        elif arm == "k0":
            made.append(pass_arm("DFlash (K = 0)", models["drafter"], 0))
        elif arm == "xpress":
            fixed_point = models["drafter"].config.num_draft_tokens
            made += [pass_arm(f"xPress K = {k}", models["drafter"], k) for k in passes]
            made.append(pass_arm("xPress fixed point", models["drafter"], fixed_point))
        elif arm == "xpress-lookup":
            arguments = {"assistant_model": models["drafter"], "prompt_lookup_num_tokens": LOOKUP_TOKENS}
            made.append(Arm("xPress and prompt lookup", arguments, own=True))
        else:
            name = {"markov": "Markov head", "dflash": "DFlash, trained alone", "assistant": "AR assistant"}[arm]
            extra = (tokenizers or {}) if arm == "assistant" else {}
            made.append(Arm(name, {"assistant_model": models[arm], **extra}, own=arm in OWN_ARMS))
    if confidence_threshold is None:
        return made
    given = {"confidence_threshold": confidence_threshold}
    return [replace(arm, arguments=arm.arguments | given) if arm.own else arm for arm in made]


def pass_arm(name: str, drafter: nn.Module, passes: int) -> Arm:
    return Arm(name, {"assistant_model": drafter, "num_passes": passes}, own=True, passes=passes)


class ForwardClock:
    """The seconds of every forward of a module, and when each ended, while the context lasts."""

    def __init__(self, module: nn.Module):
        self.module, self.device = module, next(module.parameters()).device
        self.seconds, self.ends = [], []

    def __enter__(self) -> "ForwardClock":
        self.hooks = [
            self.module.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.module.register_forward_hook(self._end),
        ]
        return self

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()

    def _begin(self, module, args, kwargs):
        self.start = read_clock(self.device)

    def _end(self, module, args, output):
        self.ends.append(read_clock(self.device))
        self.seconds.append(self.ends[-1] - self.start)


class TargetClock(ForwardClock):
    """As `ForwardClock`, and the tokens that each forward was given."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.ids = []

    def _begin(self, module, args, kwargs):
        self.ids.append(kwargs["input_ids"])
        super()._begin(module, args, kwargs)


class TokenCounts:
    """A streamer that notes how many tokens came at a time: those of each forward, in Transformers' own loops."""

    def __init__(self):
        self.prompt_seen, self.counts = False, []

    def put(self, tokens: torch.Tensor):
        if self.prompt_seen:
            self.counts.append(tokens.numel())
        self.prompt_seen = True

    def end(self):
        """Nothing is held back."""


def read_clock(device: torch.device) -> float:
    """Seconds. An accelerator's queue is drained first."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def run_arm(target, prompt: torch.LongTensor, arm: Arm, **generate) -> ArmRun:
    """One measured call on `prompt` `[1, n]`."""
    length, counts = prompt.shape[1], TokenCounts()
    arguments = {**generate, **arm.arguments} | ({} if arm.own else {"streamer": counts})
    with ExitStack() as watches:
        drafting = watches.enter_context(track_drafting())
        forwards = watches.enter_context(TargetClock(target))
        drafts = [watches.enter_context(ForwardClock(model)) for model in arm.clocked]
        start = read_clock(target.device)
        output = target.generate(prompt, attention_mask=torch.ones_like(prompt), **arguments)
        seconds = read_clock(target.device) - start
    begun, verify = forwards.ends[0], sum(forwards.seconds[1:])
    if arm.own:
        first, rounds = 1, drafting.rounds
        split = {"draft": drafting.seconds["draft"], "refine": drafting.seconds["refine"], "verify": verify}
    else:
        first, *accepted = counts.counts
        drafted = [ids.shape[1] - 1 for ids in forwards.ids[1:]]
        rounds = [Round(d, a - 1, 0) for d, a in zip(drafted, accepted, strict=True)]
        draft = sum(s for clock in drafts for s, end in zip(clock.seconds, clock.ends) if end > begun)
        split = {"draft": draft, "refine": 0.0, "verify": verify}
    return ArmRun(
        new_ids=output[0, length:].tolist(),
        prompt_hash=digest(forwards.ids[0][0, :length].tolist()),
        seconds=seconds,
        prefill_seconds=begun - start,
        first_tokens=first,
        rounds=rounds,
        split=split,
    )


@torch.no_grad()
def gap_in_steps(target, prompt: torch.LongTensor, plain: list[int], other: list[int]) -> float | None:
    """
    How far plain's best logit is above the other text's token where that parts from plain's, in its rounding steps.

    None where that cannot be said: plain's text had ended there, or the other one had.
    """
    at = next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), None)
    if at is None:
        return None
    ids = torch.cat([prompt, prompt.new_tensor([plain[:at]])], dim=1)
    logits = target(ids).logits[0, -1].float()
    best, chosen = logits.max().item(), logits[other[at]].item()
    return (best - chosen) / (torch.finfo(target.dtype).eps * max(abs(best), 1e-9))
