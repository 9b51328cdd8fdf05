"""What a run computes, as one plain float64 loop over transformers: full logits, one row at a time, Adam written out.

No code of slimelite is behind it but the arrays of the table and the values of the flags. `test_oracle.py` holds whole
runs against it: every gradient before clipping, every loss, and the weights at the end. Where the two differ, one of
them is wrong; this one is short enough to be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny import exact_norms
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from slimelite.arguments import Args
from slimelite.samples.table import SampleTable

Tensors = dict[str, Tensor]


class Oracle:
    """A policy, and for ppo a critic, that learn as `Trainer` does from the same tables.

    ``head``: weight [1, width] and bias [1] of the critic at the start.
    """

    def __init__(self, args: Args, head: list[Tensor] | None = None) -> None:
        self.args = args
        self.temperature = args.rollout_temperature if args.loss_type == "policy_loss" else 1.0
        self.policy = load(args.hf_checkpoint)
        self.reference = load(args.ref_load) if args.use_reference else None
        self.learners = [Adam(args, args.lr, dict(self.policy.named_parameters()))]
        if head is not None:
            self.critic = load(args.hf_checkpoint).model
            self.head = [part.clone().requires_grad_() for part in head]
            weights = {f"model.{name}": weight for name, weight in self.critic.named_parameters()}
            weights |= {"lm_head.weight": self.head[0], "lm_head.bias": self.head[1]}
            self.learners.append(Adam(args, args.critic_lr, weights))

    def train(self, table: SampleTable) -> None:
        """The optimizer steps of a rollout: ``--global-batch-size`` rollouts each, the last with what is left."""
        self.table, args = table, self.args
        rows = range(len(table))
        rollouts, size = list(dict.fromkeys(table.rollout_id.tolist())), args.global_batch_size or len(table)
        steps = []
        for i in range(0, len(rollouts), size):
            steps.append([row for row in rows if table.rollout_id[row] in rollouts[i : i + size]])
        with torch.no_grad():
            self.old = [self.score(self.policy, row)[0] for row in rows]
            if self.reference is not None:
                self.ref = [self.score(self.reference, row)[0] for row in rows]
            self.advantages = [torch.full((len(self.mask(row)),), self.reward(row)).double() for row in rows]
            if self.learners[1:]:
                self.values = [self.value(row) for row in rows]
                self.advantages, self.returns = zip(*[self.gae(row) for row in rows], strict=True)
            if args.normalize_advantages:
                self.whiten()
        for critic in self.learners[1:]:
            for step in steps:
                critic.step(self.mean(self.critic_loss, step))
        for step in steps:
            self.learners[0].step(self.loss(step))

    # ---- what is known of a row

    def mask(self, row: int) -> Tensor:
        """[response tokens] bool: the loss sees them."""
        return torch.tensor(self.table.row_slice("loss_mask", row) & ~self.table.removed[row])

    def tokens(self, row: int) -> tuple[Tensor, int]:
        """[1, tokens] ids, and how many of them are the prompt."""
        prompt, response = (self.table.row_slice(f"{part}_tokens", row) for part in ("prompt", "response"))
        return torch.tensor(np.concatenate([prompt, response]), dtype=torch.int64)[None], len(prompt)

    def score(self, model: Any, row: int) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [response tokens], from the logits of the position before."""
        ids, prompt = self.tokens(row)
        log_p = torch.log_softmax(model(ids).logits[0, prompt - 1 : -1] / self.temperature, -1)
        return log_p.gather(1, ids[0, prompt:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def value(self, row: int) -> Tensor:
        """V [response tokens], at the position before."""
        ids, prompt = self.tokens(row)
        return self.critic(ids).last_hidden_state[0, prompt - 1 : -1] @ self.head[0][0] + self.head[1]

    def reward(self, row: int) -> float:
        """What the rollout side made of the rewards; training holds it in fp32."""
        return float(np.float32(self.table.advantage[row]))

    def weight(self, row: int, step: list[int]) -> float:
        """Of each trained token of ``row`` in the loss of its step."""
        if self.args.loss_aggregation == "constant":
            return 1 / (len(set(self.table.rollout_id[step])) * self.args.rollout_max_response_len)
        if self.args.loss_aggregation == "token":
            return 1 / sum(int(self.mask(other).sum()) for other in step)
        rollout = self.table.rollout_id
        siblings = [other for other in step if rollout[other] == rollout[row]]
        return 1 / (sum(int(self.mask(other).sum()) for other in siblings) * len(set(rollout[step])))

    # ---- advantages of ppo

    def gae(self, row: int) -> tuple[Tensor, Tensor]:
        """Advantages and returns [response tokens]; masked tokens do not exist for it."""
        args, kept = self.args, self.mask(row).nonzero()[:, 0].tolist()
        advantages = torch.zeros(len(self.mask(row)), dtype=torch.float64)
        next_value = next_advantage = 0.0
        for t in reversed(kept):
            reward = -args.kl_coef * float(self.old[row][t] - self.ref[row][t])
            reward += self.reward(row) if t == kept[-1] else 0.0
            value = float(self.values[row][t])
            next_advantage = reward + args.gamma * next_value - value + args.gamma * args.lambd * next_advantage
            advantages[t], next_value = next_advantage, value
        return advantages, advantages + self.values[row]

    def whiten(self) -> None:
        """Mean 0 and variance 1 over the trained tokens of the whole rollout."""
        seen = torch.cat([a[self.mask(row)] for row, a in enumerate(self.advantages)])
        self.advantages = [(a - seen.mean()) / (seen.var() + 1e-8).sqrt() for a in self.advantages]

    # ---- losses

    def mean(self, loss: Callable[[int], Tensor], step: list[int]) -> Tensor:
        """The loss of a step from the sums over the trained tokens of its rows."""
        return torch.stack([loss(row) * self.weight(row, step) for row in step if self.mask(row).any()]).sum()

    def loss(self, step: list[int]) -> Tensor:
        if self.args.loss_type == "dpo_loss":
            return self.pairs_loss(step)
        if self.args.mis_batch_normalize:
            # slime's rule: what the mode mask, a rejection or a veto drops counts as if it were there
            counted = [self.weights(row)[0] for row in step if self.mask(row).any()]
            if self.args.mis_level == "sequence":
                counted = [each[:1] for each in counted]
            self.mean_weight = torch.cat(counted).mean()
        return self.mean(self.sft_loss if self.args.loss_type == "sft_loss" else self.policy_loss, step)

    def sft_loss(self, row: int) -> Tensor:
        return -self.score(self.policy, row)[0][self.mask(row)].sum()

    def policy_loss(self, row: int) -> Tensor:
        args, mask = self.args, self.mask(row)
        log_probs, entropy = (found[mask] for found in self.score(self.policy, row))
        old, advantages = self.old[row][mask], self.advantages[row][mask]
        rolled = torch.tensor(self.table.row_slice("rollout_log_probs", row)).double()[mask]
        ratio = (log_probs - old).exp()
        high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
        loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - args.eps_clip, 1 + high) * advantages)
        mismatch = (old - rolled).exp()
        if args.correction == "tis":
            loss = loss * mismatch.clamp(args.tis_clip_low, args.tis_clip)
        if args.correction == "mis" and args.mis_veto_threshold:
            loss = loss * float((mismatch >= args.mis_veto_threshold).all())
        if args.correction == "mis" and args.mis_mode != "none":
            weight, kept = self.weights(row)
            loss = loss * weight * kept / self.mean_weight
        loss = loss - args.entropy_coef * entropy
        if args.use_kl_loss:
            d = log_probs - self.ref[row][mask]
            loss = loss + args.kl_loss_coef * ((-d).exp() - 1 + d).clamp(-10, 10)
        return loss.sum()

    def weights(self, row: int) -> tuple[Tensor, Tensor]:
        """[trained tokens] of --correction mis in the modes truncate and mask, at the level token or sequence: the
        weights before any is dropped, and whether the mode keeps them.
        """
        args, mask = self.args, self.mask(row)
        rolled = torch.tensor(self.table.row_slice("rollout_log_probs", row)).double()
        log_ratio = (self.old[row] - rolled)[mask]
        if args.mis_level == "sequence":
            log_ratio = log_ratio.sum().expand_as(log_ratio)
        ratio, high = log_ratio.exp(), args.mis_upper_bound
        if args.mis_mode == "truncate":
            return ratio.clamp(max=high), torch.ones_like(ratio)
        return ratio, ((ratio >= 1 / high) & (ratio <= high)).double()

    def critic_loss(self, row: int) -> Tensor:
        values, old, goal = self.value(row), self.values[row], self.returns[row]
        clipped = old + (values - old).clamp(-self.args.value_clip, self.args.value_clip)
        return torch.maximum((clipped - goal) ** 2, (values - goal) ** 2)[self.mask(row)].sum()

    def pairs_loss(self, step: list[int]) -> Tensor:
        """Of preference pairs, the two rows of a unit; their mean."""
        args, losses = self.args, [torch.zeros(()).double()]
        units = set(self.table.unit_id[step].tolist())
        for unit in units:
            pair = sorted(np.flatnonzero(self.table.unit_id == unit).tolist(), key=lambda row: -self.table.reward[row])
            if not self.mask(pair[0]).any():
                continue
            chosen, rejected = ((self.score(self.policy, row)[0] - self.ref[row])[self.mask(row)] for row in pair)
            if args.dpo_loss == "ipo":
                losses.append((chosen.mean() - rejected.mean() - 1 / (2 * args.dpo_beta)) ** 2)
                continue
            margin, wrong = args.dpo_beta * (chosen.sum() - rejected.sum()), args.dpo_label_smoothing
            losses.append(-(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin))
        return torch.stack(losses).sum() / len(units)


class Adam:
    """AdamW (arXiv:1711.05101) after clipping by the norm; no decay of vectors.

    ``gradients``, ``losses``: of each step so far, before clipping.
    """

    def __init__(self, args: Args, lr: float, weights: dict[str, nn.Parameter] | Tensors) -> None:
        self.args, self.lr, self.weights, self.steps = args, lr, weights, 0
        self.gradients: list[Tensors] = []
        self.losses: list[float] = []
        self.first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    def step(self, loss: Tensor) -> None:
        found = torch.autograd.grad(loss, list(self.weights.values()))
        self.gradients.append(dict(zip(self.weights, found, strict=True)))
        self.losses.append(loss.item())
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in found))
        args, scale = self.args, min(1.0, self.args.clip_grad / (norm + 1e-6))
        self.steps += 1
        for (name, weight), gradient in zip(self.weights.items(), found, strict=True):
            first, second, scaled = self.first[name], self.second[name], scale * gradient
            first.mul_(args.adam_beta1).add_((1 - args.adam_beta1) * scaled)
            second.mul_(args.adam_beta2).add_((1 - args.adam_beta2) * scaled**2)
            mean, square = first / (1 - args.adam_beta1**self.steps), second / (1 - args.adam_beta2**self.steps)
            with torch.no_grad():
                weight *= 1 - self.lr * (args.weight_decay if weight.ndim > 1 else 0.0)
                weight -= self.lr * mean / (square.sqrt() + args.adam_eps)


def load(path: str | Path | None) -> Any:
    """The model in float64, norms included."""
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
    exact_norms(hf)
    return hf
