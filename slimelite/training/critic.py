"""The models beside the trained policy: the critic of ppo, and frozen policies such as the reference model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slimelite.algorithms.packed import upcast, weighted_sum
from slimelite.algorithms.policy import explained_variance, value_loss
from slimelite.arguments import Args
from slimelite.models.checkpoints import STATE_FILE
from slimelite.training import checkpoint
from slimelite.training.batch import MicroBatch
from slimelite.training.columns import TokenColumns
from slimelite.training.learner import Learner, MetricSums
from slimelite.training.loading import build_model, build_policy
from slimelite.training.loss import check_values
from slimelite.training.model import LanguageModel, PolicyModel
from slimelite.training.offload import HostMemory
from slimelite.training.optimizer import CRITIC_FLAGS
from slimelite.training.parallel import World, reshard
from slimelite.training.planning import Step

FOLDER = "critic"  # subfolder of a checkpoint


class ValueModel(LanguageModel):
    """A causal LM with a value head: a linear layer with one output and a bias, instead of the LM head.

    The head's weight and bias start at 0. So a new critic predicts 0 instead of noise, and the first advantages are
    those without a baseline. In the first step only the head learns, because with a weight of 0 the layers below it
    get no gradient.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__(hf)
        weight = hf.get_output_embeddings().weight
        head = nn.Linear(weight.shape[1], 1, dtype=weight.dtype)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        hf.set_output_embeddings(head)

    def forward(self, batch: MicroBatch) -> Tensor:
        """[R] the values at the positions that predict the response tokens of ``batch``, at least fp32."""
        head = self.hf.get_output_embeddings()
        return upcast(self.hidden(batch)) @ upcast(head.weight)[0] + upcast(head.bias)


class Critic(Learner[ValueModel]):
    """The value model and its AdamW optimizer, with the learning rate ``--critic-lr``. The methods are collective:
    every rank must call them.

    Raises:
        ValueError: there is no model at ``--critic-load``.
    """

    def __init__(self, args: Args, world: World) -> None:
        own = args.critic_load is not None and (Path(args.critic_load) / STATE_FILE).is_file()
        path = args.hf_checkpoint if own else args.critic_load or args.hf_checkpoint
        args = replace(args, lora_rank=args.critic_lora_rank, lora_adapter_path=None)
        model = build_model(args, world, path, ValueModel, trainable=True, new_head=True)
        # the optimizer reads these flags, so they get the critic's values
        args = replace(
            args,
            lr=args.critic_lr,
            lr_warmup_iters=args.critic_lr_warmup_iters,
            lr_warmup_fraction=None,
            optimizer="adam",
        )
        super().__init__(args, world, model, prefix="critic-", lr_flags=CRITIC_FLAGS)
        if own:
            checkpoint.load(Path(str(args.critic_load)), self, weights_only=True)

    def train(self, columns: TokenColumns, schedule: list[Step], sums: MetricSums) -> None:
        """Train the values to predict ``columns.returns``, with one optimizer step for each `Step` of ``schedule``.

        Metrics ``critic-*`` are added to ``sums``.

        Raises:
            ValueError: a plugin set the advantages but not the returns.
            FloatingPointError: see `Optimizers.step`.
        """
        if columns.returns is None:
            raise ValueError(
                "the function of --custom-advantage-function-path did not set columns.returns; with "
                "--advantage-estimator ppo it must set them, because the critic is trained on them"
            )
        if self.args.reset_optimizer_states:
            self.optimizers.reset()
        for sums.step, step in enumerate(schedule):
            checked = self.args.ci_test and self._fresh
            loss = self.gradient(columns, step, sums, checked=checked)
            self.update(sums, loss)
            self._fresh = self._fresh and not columns.table.mask_sums[step.rows].any()

    def gradient(self, columns: TokenColumns, step: Step, sums: MetricSums, *, checked: bool = False) -> Tensor:
        """Compute the gradients of one optimizer step, with the same token weights as for the policy; see
        `Learner.accumulate`.

        ``checked``: raise AssertionError if the values differ from ``columns.values``, which an earlier pass computed
        with the same weights.
        """
        old, returns = columns.values, columns.returns
        assert returns is not None

        def share(batch: MicroBatch) -> Tensor:
            mask, before = batch.mask, batch.take(old)
            values = self.model(batch)
            if checked:
                check_values(self.world, values, before, mask)
            losses, metrics = value_loss(values, before, batch.take(returns), mask, value_clip=self.args.value_clip)
            total = weighted_sum(losses, batch.weights)
            sums.add_all({f"critic-{name}": pair for name, pair in metrics.items()})
            sums.add_share("critic-value_loss", total)
            return total

        loss = self.accumulate(columns, step, share)
        in_step = columns.mask & torch.isin(columns.segments, torch.from_numpy(step.rows))
        sums.add("critic-explained_variance", *explained_variance(old, returns, in_step))
        return loss

    def load(self, directory: str) -> None:
        """Resume from the checkpoint at ``directory``.

        Raises:
            ValueError: the checkpoint has no critic, or the critic of another model.
        """
        folder = Path(directory) / FOLDER
        if not (folder / STATE_FILE).is_file():
            raise ValueError(
                f"{directory} was saved without a critic; to train its policy with a critic, write the policy with "
                "--save-hf, and start a new run from that folder with --hf-checkpoint"
            )
        checkpoint.load(folder, self)


def build_reference(args: Args, world: World, policy: PolicyModel) -> FrozenPolicy | AdapterReference:
    """The reference model of ``policy``: the model in ``--ref-load``, else the model that the policy started from."""
    path = args.ref_load or args.hf_checkpoint
    if args.lora_rank and path == args.hf_checkpoint:
        return AdapterReference(policy)
    return FrozenPolicy(args, world, path)


class FrozenPolicy:
    """The policy at ``path``, sharded like the trained policy. Only `copy_from` changes the weights of this copy.

    With a GPU, the shards are in host memory while this copy is not used.
    """

    def __init__(self, args: Args, world: World, path: str | None) -> None:
        self.model = build_policy(args, world, path, trainable=False)
        self._memory = HostMemory(self.model.parameters, world.device) if world.device.type == "cuda" else None
        if self._memory is not None:
            self._memory.offload()

    @contextmanager
    def weights(self, *, unchanged: bool = True) -> Iterator[PolicyModel]:
        """A context in which the policy's weights are on the device. ``unchanged``: the caller does not change the
        weights."""
        if self._memory is not None:
            self._memory.onload()
        try:
            yield self.model
        finally:
            if self._memory is not None:
                reshard(self.model)
                self._memory.offload(unchanged=unchanged)

    @contextmanager
    def state(self) -> Iterator[dict[str, nn.Parameter]]:
        """A context that yields the weights by their names in a checkpoint, without copies."""
        with self.weights(unchanged=False) as model:
            yield {name.removeprefix("hf."): parameter for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def copy_from(self, policy: PolicyModel) -> None:
        """Copy the current weights of ``policy`` (``--ref-update-interval``)."""
        with self.state() as weights:
            for name, theirs in policy.trained().items():
                weights[name].copy_(theirs)


class AdapterReference:
    """The policy before training: its frozen weights, and a frozen copy of its initial adapters. The reference shares
    its frozen weights with the trained policy, so no second model is in memory.

    A new adapter does not change the model's outputs. So without ``--lora-adapter-path``, the reference is the model of
    ``--hf-checkpoint``.
    """

    def __init__(self, policy: PolicyModel) -> None:
        self.model = policy
        # the adapters that are not in the model: the policy's inside the context `weights`, else the reference's
        self._other = {name: parameter.detach().clone() for name, parameter in policy.trained().items()}

    @contextmanager
    def weights(self) -> Iterator[PolicyModel]:
        """A context in which the policy's model has the reference's adapters."""
        self._swap()
        try:
            yield self.model
        finally:
            reshard(self.model)
            self._swap()

    @contextmanager
    def state(self) -> Iterator[dict[str, Tensor]]:
        """A context that yields the reference's adapters by their names in a checkpoint. They are not copies: a
        change of them changes the reference."""
        yield self._other

    @torch.no_grad()
    def copy_from(self, policy: PolicyModel) -> None:
        """Copy the current adapters of ``policy`` (``--ref-update-interval``)."""
        for name, theirs in policy.trained().items():
            self._other[name].copy_(theirs)

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.model.trained().items():
            kept = parameter.detach().clone()
            parameter.copy_(self._other[name])
            self._other[name].copy_(kept)
