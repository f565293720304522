"""The Engine on plain torch: accumulate, measure the norm, decide, clip, step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from llmtrain.checkpoint.store import match_tensors
from llmtrain.data.loader import Batch
from llmtrain.dist.collectives import Collectives
from llmtrain.dist.position import Position
from llmtrain.model.transformer import Transformer
from llmtrain.ops.cross_entropy import LossFunction
from llmtrain.optim.build import Optimizer
from llmtrain.optim.clip import clip_by_norm, global_norm
from llmtrain.optim.schedule import learning_rate
from llmtrain.plan.plan import SchedulePlan
from llmtrain.train.engine import EvaluationResult, StepResult
from llmtrain.train.forward_backward import ForwardBackward, score_batches

MODEL_PREFIX = "model/"
OPTIMIZER_PREFIX = "optimizer/"


class NativeEngine:
    """Model, loss and optimizer on one device; `score` is the loss that validation text is measured by."""

    def __init__(
        self,
        *,
        model: Transformer,
        score: LossFunction,
        forward_backward: ForwardBackward,
        optimizer: Optimizer,
        schedule: SchedulePlan,
        clip_norm: float | None,
        seed: int,
        device: torch.device,
        collectives: Collectives,
        position: Position,
    ) -> None:
        self.model = model
        self._score = score
        self._forward_backward = forward_backward
        self._optimizer = optimizer
        self._schedule = schedule
        self._clip_norm = clip_norm
        self._seed = seed
        self._device = device
        self._collectives = collectives
        self._position = position

    def warm_up(self, microbatch: Batch) -> None:
        """See `Engine`."""
        self._forward_backward.warm_up(microbatch.to(self._device), seed=self._seed)

    def train_step(self, update: int, microbatches: Sequence[Batch], num_targets: int) -> StepResult:
        """Make update number `update`; one division by the target tokens of the whole update, then norm, decision, clip and step.

        Whether the update is finite is decided on the losses and norms of all ranks before anything is changed, so a skipped batch
        leaves weights, moments and step counts exactly as they were, on every rank. All ranks clip by the norm of rank 0.
        """
        lr = learning_rate(self._schedule, update)
        divisor = max(num_targets, 1)
        on_device = [batch.to(self._device) for batch in microbatches]
        loss_sum = self._forward_backward.run(on_device, seed=self._seed, update=update, num_targets=divisor)
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self._position.enter("reduce")
        by_rank = self._collectives.gather(torch.stack((loss_sum / divisor, global_norm(gradients)))).tolist()  # [R, 2]
        self._position.enter("optimizer")
        # Added here, in the order of the ranks: a sum over ranks in the library need not have the same last bit everywhere.
        loss, norm = sum(share for share, _ in by_rank), by_rank[0][1]
        finite = math.isfinite(loss) and all(math.isfinite(other) for _, other in by_rank)
        if finite:
            clip_by_norm(gradients, norm, self._clip_norm)
            self._optimizer.step(lr)
        self._optimizer.zero_grad()
        return StepResult(loss=loss, grad_norm=norm, lr=lr, skipped=not finite)

    def evaluate(self, batches: Iterable[Batch], should_stop: Callable[[], bool]) -> EvaluationResult | None:
        """Token mean over all targets of all ranks; mode, gradients and counters of the training stay as they were."""

        def after_batch(batch: Batch) -> bool:
            self._position.tick()
            return should_stop()

        self._position.enter("evaluate")
        was_training = self.model.training
        self.model.eval()
        scored = score_batches(self.model, self._score, batches, self._device, after_batch)
        self.model.train(was_training)
        own = torch.tensor((scored.loss_sum, scored.num_targets, scored.was_stopped), dtype=torch.float64)
        losses, targets, stops = zip(*self._collectives.gather(own).tolist(), strict=True)
        if any(stops):
            return None
        num_targets = int(sum(targets))
        return EvaluationResult(loss=sum(losses) / max(num_targets, 1), num_targets=num_targets)

    def state(self) -> dict[str, Tensor]:
        """Weights (each tied tensor once, under its first name) and optimizer state."""
        weights = {MODEL_PREFIX + name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return weights | {OPTIMIZER_PREFIX + name: tensor for name, tensor in self._optimizer.state().items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Raises StorageError listing every missing, extra, mis-shaped or mis-typed tensor; loads nothing in that case."""
        copy_tensors(tensors, self.state(), "tensors")

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Begin with other weights (by parameter name, each tied tensor once); the optimizer stays as it was built.

        Raises StorageError as `load_state`.
        """
        own = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        copy_tensors(weights, own, "weights", cure="leave the model section to model.init_from, or choose another run")


@torch.no_grad()
def copy_tensors(saved: Mapping[str, Tensor], own: Mapping[str, Tensor], what: str, cure: str = "") -> None:
    """Copy saved tensors into those of the same name. Raises StorageError when the two sets do not match, before any is copied."""
    match_tensors(own, saved, what, cure)
    for name, target in own.items():
        target.copy_(saved[name])
