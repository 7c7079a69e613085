"""Parameters, gradients and optimizer state that live off the device and are fetched when they are needed.

The loop stays as it is: ``loss.backward(); optimizer.step()``. Hooks notice which parameters are about to be used; the
optimizer's ``step`` is replaced by one that goes through the parameters bucket by bucket:

    forward         backward                    step
    fetch 0, 1, 2   (gradients arrive 2, 1, 0)  for each bucket: fetch state, update, write back      update="step"
    fetch 0, 1, 2   2: update, write back; 1:   nothing left to do                                 update="backward"

Invariant: whenever user code runs, a parameter is either a view of device memory that the compute stream may read, or a
view of off-device storage whose copy is complete. So whatever reads or writes parameters between calls (saving,
loading, clipping, averaging) is right without knowing of any of this.

``update="backward"`` is for speed: what was updated is written back and fetched again while other things still run,
even when user code runs (`outcore.memory.param_offload.in_flight_params`). It asks that nothing be done to gradients
between ``backward()`` and ``step()``; `outcore.memory.param_offload.backward_update_guard` checks that in the first
steps. From then on hooks are few, one before the first use of each bucket and one on the last gradient of each, because
on a small network the host is slower than the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from outcore.errors import OutcoreError
from outcore.memory.param_offload.backward_update_guard import BackwardUpdateGuard
from outcore.memory.param_offload.bucketed_step import PartialOptimizer, StateCopies, bucketed_step_for
from outcore.memory.param_offload.buckets import Bucket, Use
from outcore.memory.param_offload.grad_offload import GradientStorage
from outcore.memory.param_offload.hooks import drop_redundant_hooks, hook_gradients, hook_modules
from outcore.memory.param_offload.in_flight_params import InFlightParams
from outcore.memory.param_offload.residency import ParamResidency
from outcore.memory.param_offload.writeback import Writebacks
from outcore.planner.memory.state_policy import StatePolicy


def _nothing() -> None:
    pass


class StateOffloader(ParamResidency):
    """Offloads the state of one model and its optimizer.

    Args:
        optimizer: that updates the parameters.
        uses: the calls of the model that read parameters, in order (`outcore.memory.param_offload.buckets.uses_of`).
        policy: what is offloaded and what stays on the device.
        device: where the model computes.
        state_copies: the optimizer's state of the same buckets, where it is offloaded already.
        partial: makes what calls the optimizer for some of its parameters, of the optimizer and its own step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        uses: Sequence[Use],
        policy: StatePolicy,
        device: torch.device,
        state_copies: StateCopies | None = None,
        partial: Callable[[torch.optim.Optimizer, Callable[..., Any]], PartialOptimizer] = PartialOptimizer,
    ) -> None:
        super().__init__(uses, policy, device)
        self.optimizer, self.stepper = optimizer, partial(optimizer, optimizer.step)
        self.uses, self.in_flight = tuple(uses), InFlightParams()
        self.backward_pending = False
        """A forward pass has run whose backward may still need the parameters as they are."""
        self.guard = BackwardUpdateGuard() if policy.update == "backward" else None
        self.writebacks = Writebacks(self.buckets, self.copy_streams)
        """Used where parameters are updated in backward and all of them fit on the device."""
        self.settings: list[dict[str, Any]] | None = None
        """The optimizer's settings when it updated in backward, None before."""
        self.in_forward = False
        self.callback_queued = False
        self.state_copies = state_copies
        if state_copies is None and policy.optimizer == "offload":
            self.state_copies = StateCopies(self.stepper, device, self.copy_streams)
        self.gradients: GradientStorage | None = None
        self.handles: list[Any] = []
        self.needs: list[Any] = []
        """Hooks before the forward of modules."""
        self.few_hooks = False
        """Whether only the first use of each bucket has a hook."""
        self.hooks: dict[int, Any] = {}
        """Parameter (id) -> the hook on its gradient."""
        self._own_step = optimizer.__dict__.get("step")
        try:
            if policy.gradients == "offload":
                self.gradients = GradientStorage(self.buckets, device, self.copy_streams)
            self._install()
        except BaseException:
            self.close()
            raise

    def _install(self) -> None:
        """Install the hooks and the bucketed step, and offload the optimizer state that exists already."""
        optimizer = self.optimizer
        if self.policy.parameters == "offload":
            self.needs = hook_modules(self, self.uses)
        if self.guard is not None or self.windowed:
            self.hooks, before = hook_gradients(self, both=self.gradients is not None)
            self.handles += before
        optimizer.step = bucketed_step_for(self)  # type: ignore[method-assign]
        if self.state_copies is not None:
            synchronize = weakref.WeakMethod(self.synchronize)
            self.handles.append(optimizer.register_state_dict_pre_hook(lambda _: (synchronize() or _nothing)()))
            for bucket in self.buckets:  # what exists already is offloaded
                if bucket.number not in self.state_copies.flat_buffers:
                    self.state_copies.write_back(bucket.number, bucket.trained)

    @property
    def updates_in_backward(self) -> bool:
        """Whether parameters are updated in backward: asked for, and found to be safe."""
        return self.guard is not None and self.guard.allowed is True

    # Forward

    def around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass, fetching parameters as they are needed."""
        if self.in_forward:
            return forward(*args, **kwargs)
        self.begin_forward()
        self.in_forward = True
        try:
            result = forward(*args, **kwargs)
        except BaseException:
            if not self.backward_pending:
                self.offload_all()
            self.synchronize()
            raise
        finally:
            self.in_forward = False
        self.backward_pending = self.backward_pending or torch.is_grad_enabled()
        if not self.backward_pending:
            self.offload_all()
        self.synchronize()
        return result

    def begin_forward(self) -> None:
        """Prepare for a forward pass: prefetch what was offloaded, in the order in which it is needed."""
        self.in_flight.unmark()
        if self.guard is not None and self.guard.allowed is None:
            self.guard.before_forward(self.buckets)
        if not self.backward_pending:  # a backward that failed may have left some
            self.callback_queued = False
            for bucket in self.buckets:
                bucket.gradients_ready.clear()
        self.prefetch_all()
        if self.few_hooks and not all(
            flat_buffer.resident for flat_buffer in self.flat_buffers
        ):  # too few hooks to fetch them one by one
            self.fetch(*self.buckets)

    def fetch(self, *buckets: Bucket, backward: bool = False) -> None:
        """Make the parameters of some buckets resident; what forward does not need again may be written back."""
        super().fetch(*buckets, backward=backward)
        if (
            self.few_hooks
            and self.in_forward
            and self.writebacks.last in buckets
            and not (backward or self.hooks_disabled)
        ):
            if torch.is_grad_enabled():
                self.in_flight.mark(self.writebacks.start_delayed(), gradients=True)

    def synchronize(self) -> None:
        """Wait for all copies but those of parameters in flight, because user code runs next."""
        self.expose(other_than=self.in_flight.flat_buffers)
        for others in (self.state_copies, self.gradients):
            if others is not None:
                others.synchronize()

    # Backward

    def before_gradient(self, bucket: Bucket) -> None:
        """Fetch the offloaded gradients of a bucket, because backward is about to add to one of them."""
        if self.gradients is not None and self.gradients.offloaded(bucket):
            self.fetch(bucket, backward=True)
            self.gradients.fetch(bucket)

    def gradient_ready(self, p: torch.Tensor) -> None:
        """Handle the gradient of a parameter that backward has just accumulated; the bucket before it is next."""
        bucket = self.bucket_of[id(p)]
        self.in_flight.wait_for(bucket.weights)
        self._finish_bucket(bucket, p)
        self.in_flight.wait_for(self.writebacks.previous.get(bucket))

    def _finish_bucket(self, bucket: Bucket, p: torch.Tensor) -> None:
        """Update or offload a bucket if this was the last of its gradients."""
        if bucket.updated:
            raise OutcoreError(
                'a second backward before optimizer.step(): with update="backward" the first was already applied; '
                'use update="step" to add up gradients over several passes'
            )
        if self.updates_in_backward:
            if any(q.grad is None for q in bucket.trained):
                return  # the last one of the first steps is not the last one any more: the step does what is left
        else:
            if self.guard is not None:
                self.guard.gradient(bucket, p)
            bucket.gradients_ready.add(id(p))
            if len(bucket.gradients_ready) < len(bucket.trained):
                return
            bucket.gradients_ready.clear()
        if self.updates_in_backward:
            if self.settings is None:
                self.settings = self.stepper.settings()
            self.update(bucket, then=self.buckets[bucket.number - 1] if bucket.number else None)
            for q in bucket.trained:
                q.grad = None
            bucket.updated = True
        elif self.windowed:
            self._offload_gradients(bucket)

    def _offload_gradients(self, bucket: Bucket) -> None:
        """Evict a bucket that this pass does not need again, and offload its gradients."""
        assert bucket.weights is not None
        storage = self.gradients.offload(bucket) if self.gradients is not None else None
        self.evict(bucket.weights)
        if storage is not None:
            assert self.gradients is not None
            self.gradients.point_grads_at_storage(bucket, storage)
        if not self.callback_queued:
            self.callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self.callback_queued = False
        self.synchronize()

    def update(self, bucket: Bucket, then: Bucket | None) -> None:
        """Update the parameters of a bucket and write them back; the state of the next bucket is prefetched."""
        self.fetch(bucket, backward=True)
        storage = None
        if self.gradients is not None and self.gradients.offloaded(bucket):
            storage = self.gradients.storages[bucket.number].memory
            self.gradients.fetch(bucket)
        if self.state_copies is not None:
            self.state_copies.make_resident(bucket.number, bucket.trained)
            if then is not None:
                self.state_copies.prefetch(then.number)
        self.stepper.run(bucket.trained)
        if self.state_copies is not None:
            self.state_copies.write_back(bucket.number, bucket.trained)
        if bucket.weights is not None and self.updates_in_backward and not self.windowed:
            self.writebacks.updated(bucket)
        elif bucket.weights is not None:
            bucket.weights.write_back()
            if self.windowed:
                self.evict_clean(bucket.weights)
        if storage is not None:
            assert self.gradients is not None
            self.gradients.point_grads_at_storage(bucket, storage)

    # The optimizer's step

    def step(self) -> None:
        """Do what is left of the optimizer's step."""
        updates_in_backward = self.updates_in_backward
        self.in_flight.wait_all()  # what backward did not reach
        if updates_in_backward:
            self.stepper.refuse_changes(self.settings)
        elif self.guard is not None and self.guard.allowed is None:
            self.guard.before_step(self.buckets)
        waiting = [
            bucket for bucket in self.buckets if not bucket.updated and any(p.grad is not None for p in bucket.trained)
        ]
        if self.windowed:
            waiting.reverse()  # the first ones are then resident when forward begins
        for i, bucket in enumerate(waiting):
            self.update(bucket, then=waiting[i + 1] if i + 1 < len(waiting) else None)
            for p in bucket.trained if updates_in_backward else ():
                p.grad = None
        self.writebacks.start_remaining()
        self.stepper.update_others(self.bucket_of.keys())
        for bucket in self.buckets:
            bucket.updated = False
            bucket.gradients_ready.clear()
        self.backward_pending, self.settings = False, None
        if not updates_in_backward or self.windowed:
            self.offload_all()
            self.synchronize()
        else:
            coming = [
                flat_buffer for flat_buffer in self.flat_buffers if flat_buffer.copies_in
            ]  # to ask whether its copy is over would take longer
            self.expose(other_than=coming)
            self.in_flight.mark(coming)  # a copy in flight must not overwrite what user code writes
        if self.guard is not None and not updates_in_backward:
            self.guard.after_step(self.buckets)
            if self.updates_in_backward:
                drop_redundant_hooks(self, self.guard.last.values())

    # The end

    def close(self) -> None:
        """Move everything back to the device, into ordinary tensors, and remove the hooks."""
        self.in_flight.wait_all()
        self.offload_all()
        for handle in (*self.handles, *self.needs, *self.hooks.values()):
            handle.remove()
        for flat_buffer in self.flat_buffers:
            for member in flat_buffer.members:
                grad, member.tensor.grad = member.tensor.grad, None
                member.tensor.data = member.tensor.data.to(self.device, copy=True)
                if grad is not None:
                    member.tensor.grad = grad.to(self.device, copy=self.gradients is not None)
        for others in (self.state_copies, self.gradients):
            if others is not None:
                others.close()
        if self._own_step is None:
            self.optimizer.__dict__.pop("step", None)
        else:
            self.optimizer.step = self._own_step  # type: ignore[method-assign]
        self.copy_streams.close()
        if self.storage is not None:
            self.storage.close()
        self.buckets, self.uses, self.handles, self.calls, self.bucket_of = [], (), [], {}, {}
        self.writebacks = Writebacks((), self.copy_streams)
