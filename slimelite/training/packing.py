"""Decides whether a model may be trained on packed sequences. For this, a small copy of the model is tested before
training.

Some layers have a state that goes from token to token: linear attention, Mamba, convolutions. If the code of such a
layer does not handle packing, the state of one packed sequence enters the next sequence. Shared prefixes fail too:
every row must start from the state at the end of its prefix, and such code does not restore this state. In both cases
there is no exception, but the log-probs are wrong.
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

# largest difference of log-probs that counts as rounding [nats]; docs/algorithms.md has the differences of 165 families
TOLERANCE = 1e-3
# std of the noise that is added to the weights. Without noise, new layers are almost the identity and hide errors
SPREAD = 0.1


class NoSmallModel(ValueError):
    """transformers cannot run a small copy of the model, so the log-probs of packed rows cannot be tested."""


class NotTrainable(ValueError):
    """The trainer's log-probs of a model differ from transformers' log-probs. ``reason``: a message. ``eager``: whether
    the log-probs are equal with eager attention."""

    def __init__(self, family: str, reason: str, eager: bool) -> None:
        remedy = "docs/algorithms.md lists the families that can be trained"
        if eager:
            remedy = "use --attn-implementation eager, which gives the model a mask tensor in each forward pass"
        super().__init__(f"{family} cannot be trained: {reason}; {remedy}")
        self.reason, self.eager = reason, eager


AHEAD = "its tokens attend to later tokens"
FAILS = "its forward pass fails here"
OWN_CODE = "it has its own attention code, which cannot be replaced"
MASKED = "its layers read a mask tensor, and packed rows have none"


class Packing(IntEnum):
    """How the rows of a micro-batch may share a forward pass."""

    ALONE = 0  # one sequence in each forward pass
    PACKED = 1  # several sequences, one after the other
    SHARED = 2  # like PACKED, and a prefix that rows share is computed once


def may_pack(config: PretrainedConfig, attention: str, *, pairs: bool = False) -> Packing:
    """The best packing with which every row gets the same log-probs as in a forward pass of its own.

    The result is cached, because the models of a run usually have the same config.

    Args:
        attention: transformers' name of the attention that the model is trained with.
        pairs: whether two padded rows may share a forward pass if packing is not possible.

    Raises:
        NoSmallModel: a small copy of the model cannot be run.
        NotTrainable: even without packing, log-probs differ from those of transformers' own forward pass, or the
            forward pass fails.
    """
    return _may_pack(pickle.dumps(config), attention, pairs)


@lru_cache(maxsize=16)
def _may_pack(pickled: bytes, attention: str, pairs: bool) -> Packing:
    config = pickle.loads(pickled)
    small = _small_model(config)
    # flash attention needs a GPU, so sdpa is tested instead. Both identify packed sequences by their position ids
    packed, problem = small.compare("sdpa" if attention.startswith("flash") else attention, pairs)
    if not problem:
        return packed
    other = problem if attention == "eager" else small.compare("eager", pairs)[1]
    if eager := not other:  # eager attention differs only in its mask tensors
        problem = MASKED if problem.startswith(FAILS) else problem.replace(" here", " without mask tensors")
    elif problem == OWN_CODE:
        problem = other
    raise NotTrainable(config.model_type, problem, eager)


def why_alone(config: PretrainedConfig, attention: str) -> str:
    """A message that explains why packed rows do not get the same log-probs as rows alone."""
    return _small_model(config).why_alone(attention)


def _small_model(config: PretrainedConfig) -> SmallModel:
    problem: Exception | None = None
    # a model may need kernels that only run on a GPU, so the second try is on a GPU
    for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
        try:
            return SmallModel(config, device)
        except Exception as error:  # errors of any type, for example if a config does not fit its model_type
            problem = error
    raise NoSmallModel(
        f"{config.model_type}: a small copy of the model cannot be run, so it is not known whether packed sequences "
        f"change each other's log-probs: {one_line(problem)}"
    ) from problem


class SmallModel:
    """A small copy of a model, some rows, and the correct log-probs of each row. transformers' own forward pass
    computes these log-probs, for one row at a time, with eager attention and in eval(). Rows 2 and 3 share a prefix,
    and rows 0 and 4 have the same length.
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
        """Returns (packing, problem) for this attention. ``packing``: the best packing with correct log-probs.
        ``problem``: a message if even unpacked rows get wrong log-probs, else ""."""
        try:
            policy = self._policy(attention)
            right = [packing for packing, rows in TESTS.items() if self._gap(policy, rows, packing) < TOLERANCE]
            apart = max(self._gap(policy, rows, Packing.ALONE) for rows in [[0], [1]] + [[0, 1]] * pairs)
            weights = policy.hf.state_dict()
            if any(not torch.equal(weights[name].cpu(), tensor) for name, tensor in self._weights.items()):
                return Packing.ALONE, "its forward pass changes its weights"
            if self._looks_ahead():  # then even an unpacked token has another log-prob than when it was sampled
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
        """A message that explains why packed rows do not get the correct log-probs. The message names the first module
        whose outputs differ."""
        policy = self._policy(attention)
        packed, other, alone = (self._seen(policy, rows) for rows in ([0, 1], [4, 1], [1]))
        if name := _first_difference(packed, other):
            return f"in a pack, {name} reads the preceding sequence"
        return f"in a pack, the output of {_first_difference(packed, alone)} depends on the place of the sequence"

    def _looks_ahead(self) -> bool:
        """Whether log-probs depend on later tokens."""
        changed = self._rows[1].clone()
        changed[:, -1] = 1 + changed[:, -1] % (VOCABULARY - 1)
        return bool((self._own_log_probs(changed) - self._right[1])[:-1].abs().max() > TOLERANCE)

    def _why_other(self, policy: PolicyModel) -> str:
        """A message that explains why a row alone does not get the correct log-probs."""
        ids = self._rows[1]
        if (self._own_log_probs(ids) - self._right[1]).abs().max() > TOLERANCE:
            return "its log-probs change from call to call"
        with _outputs(self._own) as theirs:
            self._own(input_ids=ids, use_cache=False)
        if name := _first_difference(self._seen(policy, [1]), theirs):
            return f"its {name} computes something different here"
        return "its logits are not the output of its LM head"

    def _policy(self, attention: str) -> PolicyModel:
        """The same model as a `PolicyModel`, as in training, with this attention."""
        register_attention()
        with torch.random.fork_rng(devices=[]):  # the test must not change the run's random numbers
            twin = self._build(attention)
        twin.load_state_dict(self._weights)
        return PolicyModel(twin.to(self._own.device))

    def _build(self, attention: str) -> PreTrainedModel:
        # a copy, because transformers stores the attention's name in the config
        config = copy.deepcopy(self._config)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
        assert isinstance(model, PreTrainedModel)
        return model.eval()

    def _own_log_probs(self, ids: Tensor) -> Tensor:
        logits = self._own(input_ids=ids, use_cache=False).logits[0, :-1]
        return logits.float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]

    def _gap(self, policy: PolicyModel, rows: list[int], packing: Packing) -> float:
        """The largest difference from the correct log-probs [nats]."""
        policy.packed, shares = packing >= Packing.PACKED, packing is Packing.SHARED
        batch = MicroBatch(self._columns, np.array(rows, np.int64), self._own.device, shares=shares)
        difference = policy(batch, 1.0)[0] - torch.cat([self._right[row] for row in rows])
        # NaN counts as a difference
        return float(difference.abs().nan_to_num(nan=torch.inf).max())

    def _seen(self, policy: PolicyModel, rows: list[int]) -> Outputs:
        """The outputs of all modules for these packed rows."""
        policy.packed = True
        with _outputs(policy.hf) as seen:
            policy(MicroBatch(self._columns, np.array(rows, np.int64), self._own.device), 1.0)
        return seen


# (class, first input, first output) of every module, in the order in which the modules end
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
    """The class of the first module whose outputs for row 1 differ between two forward passes, or "".

    Both passes end with row 1.
    """
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
    """The part of each tensor that belongs to row 1, which is alone or after another row. The result is empty if the
    tensors do not have a dimension of tokens."""
    lengths = (LENGTHS[1], LENGTHS[0] + LENGTHS[1])
    if any(x.ndim < 2 or x.shape[1] not in lengths for x in tensors):
        return ()
    parts = tuple(x[:, -LENGTHS[1] :].float() for x in tensors)
    return parts if parts[0].shape == parts[1].shape else ()


def one_line(error: Exception | None) -> str:
    """The message of ``error`` on one line. The message starts with the type of the error, unless the type is
    ValueError or OSError."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"


# lengths of the rows. All are longer than WINDOW, so windows have an effect. Some are shorter and others longer than
# CONTEXT, so rotary embeddings that depend on the length have an effect
LENGTHS = (9, 13, SHORTEST + 5, SHORTEST + 8, 9)
# the rows that are tested together
TESTS = {Packing.PACKED: [0, 1], Packing.SHARED: [0, 2, 3]}
