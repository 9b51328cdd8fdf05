"""Whether a model may be trained on packed sequences, seen on a small copy of it before it is trained.

A layer that carries a state from token to token (linear attention, Mamba, a convolution) does not stop where one packed
sequence ends and the next begins, unless its code was written to. Nothing fails then: the log-probs are merely wrong.
"""

from __future__ import annotations

import copy
import pickle
from functools import lru_cache

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from slimelite.sample import Sample
from slimelite.table import SampleTable
from slimelite.training.attention import register_attention
from slimelite.training.batch import MicroBatch
from slimelite.training.configs import LENGTHS, VOCABULARY, small_config
from slimelite.training.model import PolicyModel

# largest difference of log-probs that is rounding [nats]; docs/algorithms.md says what was seen in 165 families
TOLERANCE = 1e-3
# as large as weights of a trained model's layers are to their inputs: defaults are nearly the identity
SPREAD = 0.1


class NoSmallModel(ValueError):
    """transformers itself cannot run a small copy of a model, so that there is nothing to compare with."""


def may_pack(config: PretrainedConfig, attention: str, *, pairs: bool = False) -> bool:
    """Whether the log-probs of packed sequences are those of each alone; False: the model is trained on one sequence a
    forward pass, which is right.

    The answer is kept: the models of a run are mostly of one config.

    Args:
        attention: the transformers attention name that the model is trained with.
        pairs: whether two rows, each padded, will share a forward pass that is not packed.

    Raises:
        NoSmallModel: it cannot be seen.
        ValueError: even alone they are not those of transformers' own forward pass, or the forward pass fails.
    """
    return _may_pack(pickle.dumps(config), attention, pairs)


@lru_cache(maxsize=16)
def _may_pack(pickled: bytes, attention: str, pairs: bool) -> bool:
    config = pickle.loads(pickled)
    small = _small_model(config)
    # flash attention needs a GPU; sdpa masks packed sequences by the same position ids
    packed, problem = small.compare("sdpa" if attention.startswith("flash") else attention, pairs)
    if not problem:
        return packed
    remedy = "docs/algorithms.md says which families can be"
    if attention != "eager" and not small.compare("eager", pairs)[1]:
        remedy = "--attn-implementation eager computes it right, with a mask tensor for each forward pass"
    raise ValueError(f"{config.model_type} cannot be trained: {problem}; {remedy}")


def _small_model(config: PretrainedConfig) -> SmallModel:
    problem: Exception | None = None
    # kernels that are installed for GPUs alone fail on a CPU
    for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
        try:
            return SmallModel(config, device)
        except Exception as error:  # any: of a config that only looks like one of its family, say
            problem = error
    raise NoSmallModel(
        f"{config.model_type}: no small copy of it can be run, so that it is not known whether packed sequences mix: "
        f"{one_line(problem)}"
    ) from problem


class SmallModel:
    """A small copy of a model, two rows, and what transformers' own forward pass says of each alone, with its plainest
    attention.
    """

    def __init__(self, config: PretrainedConfig, device: str) -> None:
        self._config = small_config(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._model = self._build("eager")
            for parameter in self._model.parameters():
                parameter.add_(torch.randn_like(parameter) * SPREAD)
            rows = [torch.randint(1, VOCABULARY, (length,)) for length in LENGTHS]
        self._model.to(device)
        self._right, samples = [], []
        for i, ids in enumerate(rows):
            logits = self._model(input_ids=ids[None].to(device), use_cache=False).logits[0, :-1]
            self._right.append(logits.float().log_softmax(-1).gather(-1, ids[1:, None].to(device))[:, 0])
            samples.append(Sample(group_index=i, index=i, tokens=ids[:1].tolist(), reward=0.0))
            samples[i].append_response_tokens(ids[1:].tolist(), log_probs=[0.0] * (len(ids) - 1))
        self._table = SampleTable.from_samples([samples])

    def compare(self, attention: str, pairs: bool) -> tuple[bool, str]:
        """Whether packed rows are right with this attention, and what is wrong with rows that are not packed."""
        register_attention()
        try:
            with torch.random.fork_rng(devices=[]):  # a run's own random numbers stay what they would be without this
                twin = self._build(attention)
            twin.load_state_dict(self._model.state_dict())
            policy = PolicyModel(twin.to(self._model.device))
            together = self._gap(policy, [0, 1], packed=True)
            apart = max(self._gap(policy, rows, packed=False) for rows in [[0], [1]] + [[0, 1]] * pairs)
        except Exception as error:  # models raise anything when they are called in a way they do not know
            if isinstance(error, KeyError) and attention in str(error):
                return False, "its attention cannot be exchanged for the one here"
            return False, f"its forward pass fails here: {one_line(error)}"
        problem = f"its log-probs differ by {apart:.1e} from transformers' own" if apart >= TOLERANCE else ""
        return together < TOLERANCE, problem

    def _build(self, attention: str) -> PreTrainedModel:
        # transformers keeps the attention in the config
        config = copy.deepcopy(self._config)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
        assert isinstance(model, PreTrainedModel)
        return model.requires_grad_(False).train()

    def _gap(self, policy: PolicyModel, rows: list[int], *, packed: bool) -> float:
        """Largest difference from what is right."""
        policy.packed = packed
        batch = MicroBatch.from_table(self._table, np.array(rows, np.int64), self._model.device)
        difference = policy(batch, 1.0)[0] - torch.cat([self._right[row] for row in rows])
        # NaN is not below any tolerance
        return float(difference.abs().nan_to_num(nan=torch.inf).max())


def one_line(error: Exception | None) -> str:
    """The message of ``error``, and its kind where it is not a message to a user."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"
