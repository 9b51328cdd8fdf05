"""Decides whether a model may be trained on packed sequences. It tests a small copy of the model before training.

Some layers carry a state from token to token: linear attention, Mamba, a convolution. Unless their code handles
packing, the state runs over from one packed sequence into the next, and cannot go back to the end of a shared prefix.
No error is raised then: the log-probs are just wrong.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from slimelite.models.small import VOCABULARY, small_config
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable
from slimelite.training.attention import register_attention
from slimelite.training.batch import MicroBatch
from slimelite.training.columns import TokenColumns
from slimelite.training.model import PolicyModel
from slimelite.training.planning import SHORTEST

# largest difference of log-probs that counts as rounding [nats]; docs/algorithms.md reports those of 165 families
TOLERANCE = 1e-3
# std of the noise on the weights, so that layers act as strongly as trained ones: new layers are nearly the identity
SPREAD = 0.1


class NoSmallModel(ValueError):
    """transformers cannot run a small copy of the model, so packed log-probs cannot be compared."""


class NotTrainable(ValueError):
    """Log-probs differ from transformers' own. ``reason``: why. ``eager``: whether eager attention fixes it."""

    def __init__(self, family: str, reason: str, eager: bool) -> None:
        remedy = "docs/algorithms.md lists the families that can be trained"
        if eager:
            remedy = "--attn-implementation eager computes it correctly, with a mask tensor for each forward pass"
        super().__init__(f"{family} cannot be trained: {reason}; {remedy}")
        self.reason, self.eager = reason, eager


AHEAD = "its tokens attend to later tokens"
FAILS = "its forward pass fails here"
OWN_CODE = "it has its own attention code, which cannot be replaced"
MASKED = "its layers read a mask tensor, and packed rows have none"


class Packing(IntEnum):
    """How the rows of a micro-batch may share a forward pass."""

    ALONE = 0  # not at all: one sequence a forward pass
    PACKED = 1  # sequences end to end
    SHARED = 2  # a prefix that rows share is in it once


def may_pack(config: PretrainedConfig, attention: str, *, pairs: bool = False) -> Packing:
    """How rows may be packed and still get the same log-probs as each row alone.

    The answer is cached, because the models of a run usually have the same config.

    Args:
        attention: the transformers attention name that the model is trained with.
        pairs: whether two rows, each padded, may share a forward pass if packing is not possible.

    Raises:
        NoSmallModel: no small copy of the model can be run.
        NotTrainable: even without packing, log-probs differ from transformers' own forward pass, or the forward pass
            fails.
    """
    return _may_pack(pickle.dumps(config), attention, pairs)


@lru_cache(maxsize=16)
def _may_pack(pickled: bytes, attention: str, pairs: bool) -> Packing:
    config = pickle.loads(pickled)
    small = _small_model(config)
    # flash attention needs a GPU; sdpa masks packed sequences by the same position ids
    packed, problem = small.compare("sdpa" if attention.startswith("flash") else attention, pairs)
    if not problem:
        return packed
    other = problem if attention == "eager" else small.compare("eager", pairs)[1]
    if eager := not other:  # which differs by its masks alone
        problem = MASKED if problem.startswith(FAILS) else problem.replace(" here", " without mask tensors")
    elif problem == OWN_CODE:
        problem = other
    raise NotTrainable(config.model_type, problem, eager)


def why_alone(config: PretrainedConfig, attention: str) -> str:
    """Why packed rows do not get the log-probs of rows alone, as a text for people."""
    return _small_model(config).why_alone(attention)


def _small_model(config: PretrainedConfig) -> SmallModel:
    problem: Exception | None = None
    # kernels that are installed only for GPUs fail on a CPU
    for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
        try:
            return SmallModel(config, device)
        except Exception as error:  # of any type, for example if a config only looks like its family's
            problem = error
    raise NoSmallModel(
        f"{config.model_type}: a small copy of the model cannot be run, so it is not known whether packed sequences "
        f"mix: {one_line(problem)}"
    ) from problem


class SmallModel:
    """A small copy of a model, some rows, and the right log-probs of each row alone. transformers' own forward pass
    computed these, with eager attention and in eval(). Rows 2 and 3 share a prefix; rows 0 and 4 are equally long.
    """

    @torch.no_grad()
    def __init__(self, config: PretrainedConfig, device: str) -> None:
        self._config = small_config(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._own = self._build("eager")
            for parameter in self._own.parameters():
                parameter.add_(torch.randn_like(parameter) * SPREAD)
            rows = [torch.randint(1, VOCABULARY, (length,)) for length in LENGTHS]
        rows[3][:SHORTEST] = rows[2][:SHORTEST]
        self._weights = {name: tensor.clone() for name, tensor in self._own.state_dict().items()}
        self._own.to(device)
        self._rows = [ids[None].to(device) for ids in rows]
        self._right = [self._own_log_probs(ids) for ids in self._rows]
        samples = []
        for i, ids in enumerate(rows):
            samples.append(Sample(group_index=i, index=i, tokens=ids[:1].tolist(), reward=0.0))
            samples[i].append_response_tokens(ids[1:].tolist(), log_probs=[0.0] * (len(ids) - 1))
        self._columns = TokenColumns.from_table(SampleTable.from_samples([samples]))

    @torch.no_grad()
    def compare(self, attention: str, pairs: bool) -> tuple[Packing, str]:
        """The packing that gets the right log-probs with this attention, and the problem of unpacked rows, or ""."""
        try:
            policy = self._policy(attention)
            right = [packing for packing, rows in TESTS.items() if self._gap(policy, rows, packing) < TOLERANCE]
            apart = max(self._gap(policy, rows, Packing.ALONE) for rows in [[0], [1]] + [[0, 1]] * pairs)
            weights = policy.hf.state_dict()
            if any(not torch.equal(weights[name].cpu(), tensor) for name, tensor in self._weights.items()):
                return Packing.ALONE, "its forward pass changes its weights"
            if self._looks_ahead():  # alone, too, such a token has another log-prob than when it is sampled
                return Packing.ALONE, AHEAD
            why = self._why_other(policy) if apart >= TOLERANCE else ""
        except Exception as error:  # models may raise anything when they are called in an unsupported way
            if isinstance(error, KeyError) and attention in str(error):
                return Packing.ALONE, OWN_CODE
            return Packing.ALONE, f"{FAILS}: {one_line(error)}"
        problem = why and f"{why}: its log-probs differ by {apart:.1e} from transformers' own"
        return max(right, default=Packing.ALONE), problem

    @torch.no_grad()
    def why_alone(self, attention: str) -> str:
        """Why packed rows do not get the right log-probs, as a text for people. It names the first module that
        differs."""
        policy = self._policy(attention)
        packed, other, alone = (self._seen(policy, rows) for rows in ([0, 1], [4, 1], [1]))
        if name := _first_difference(packed, other):
            return f"in a pack its {name} sees the sequence before"
        return f"in a pack its {_first_difference(packed, alone)} depends on where a sequence begins"

    def _looks_ahead(self) -> bool:
        """Whether log-probs depend on later tokens."""
        changed = self._rows[1].clone()
        changed[:, -1] = 1 + changed[:, -1] % (VOCABULARY - 1)
        return bool((self._own_log_probs(changed) - self._right[1])[:-1].abs().max() > TOLERANCE)

    def _why_other(self, policy: PolicyModel) -> str:
        """Why a row alone does not get the right log-probs, as a text for people."""
        ids = self._rows[1]
        if (self._own_log_probs(ids) - self._right[1]).abs().max() > TOLERANCE:
            return "its log-probs change from call to call"
        with _outputs(self._own) as theirs:
            self._own(input_ids=ids, use_cache=False)
        if name := _first_difference(self._seen(policy, [1]), theirs):
            return f"its {name} computes something different here"
        return "its logits are not the output of its LM head"

    def _policy(self, attention: str) -> PolicyModel:
        """The same model in the form that is trained here, with this attention."""
        register_attention()
        with torch.random.fork_rng(devices=[]):  # the test does not change the run's own random numbers
            twin = self._build(attention)
        twin.load_state_dict(self._weights)
        return PolicyModel(twin.to(self._own.device))

    def _build(self, attention: str) -> PreTrainedModel:
        # transformers keeps the attention in the config
        config = copy.deepcopy(self._config)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
        assert isinstance(model, PreTrainedModel)
        return model.eval()

    def _own_log_probs(self, ids: Tensor) -> Tensor:
        logits = self._own(input_ids=ids, use_cache=False).logits[0, :-1]
        return logits.float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]

    def _gap(self, policy: PolicyModel, rows: list[int], packing: Packing) -> float:
        """The largest difference from the right log-probs [nats]."""
        policy.packed, shares = packing >= Packing.PACKED, packing is Packing.SHARED
        batch = MicroBatch(self._columns, np.array(rows, np.int64), self._own.device, shares=shares)
        difference = policy(batch, 1.0)[0] - torch.cat([self._right[row] for row in rows])
        # NaN is not below any tolerance
        return float(difference.abs().nan_to_num(nan=torch.inf).max())

    def _seen(self, policy: PolicyModel, rows: list[int]) -> Outputs:
        """The outputs of all modules for these rows, laid end to end."""
        policy.packed = True
        with _outputs(policy.hf) as seen:
            policy(MicroBatch(self._columns, np.array(rows, np.int64), self._own.device), 1.0)
        return seen


# of every module, in the order in which they end: its class, what it was given, and what it made of it
Outputs = list[tuple[str, Tensor, Tensor]]


@contextmanager
def _outputs(model: nn.Module) -> Iterator[Outputs]:
    outputs: Outputs = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else (output,)
        firsts = [
            next((x for x in part if isinstance(x, Tensor)), None) for part in ((*args, *kwargs.values()), values)
        ]
        if firsts[0] is not None and firsts[1] is not None:
            outputs.append((type(module).__name__, firsts[0].clone(), firsts[1].clone()))

    hooks = [module.register_forward_hook(keep, with_kwargs=True) for module in model.modules()]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _first_difference(one: Outputs, two: Outputs) -> str:
    """The first module whose outputs for the same last row (`LENGTHS`) differ between two forward passes, or ""."""
    for (name, *mine), (same, *theirs) in zip(one, two, strict=False):
        if name != same:
            break
        inputs, made = (_row(a, b) for a, b in zip(mine, theirs, strict=True))
        if inputs and made and _alike(*inputs) and not _alike(*made):
            return name
    return ""


def _alike(one: Tensor, two: Tensor) -> bool:
    return torch.allclose(one, two, rtol=1e-3, atol=1e-4)


def _row(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The part of the tensors that belongs to row 1, whether row 1 is alone or after row 0. It is empty if the
    tensors are not ordered by tokens."""
    lengths = (LENGTHS[1], LENGTHS[0] + LENGTHS[1])
    if any(x.ndim < 2 or x.shape[1] not in lengths for x in tensors):
        return ()
    parts = tuple(x[:, -LENGTHS[1] :].float() for x in tensors)
    return parts if parts[0].shape == parts[1].shape else ()


def one_line(error: Exception | None) -> str:
    """The message of ``error`` on one line. Its type comes first, unless it is a ValueError or OSError."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"


# all exceed WINDOW, one is below and others above CONTEXT, so that windows and length-dependent ropes have an effect
LENGTHS = (9, 13, SHORTEST + 5, SHORTEST + 8, 9)
# the rows that are tested together
TESTS = {Packing.PACKED: [0, 1], Packing.SHARED: [0, 2, 3]}
