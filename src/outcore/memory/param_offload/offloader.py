"""Parameters, gradients and optimizer state that live below the device and come when they are needed.

The loop stays as it is: ``loss.backward(); optimizer.step()``. Hooks notice which parameters are about to be used; the
optimizer's ``step`` is taken over and goes through the parameters bucket by bucket:

    forward        backward                    step
    need 0, 1, 2   (gradients arrive 2, 1, 0)  for each bucket: bring state, update, send home        update="step"
    need 0, 1, 2   2: update, send; 1: ...     nothing left to do                                  update="backward"

Invariant: whenever user code runs, a parameter is either a view of the stage that the computing stream may read, or a
view of a home whose copy is complete. So whatever reads or writes parameters between calls (saving, loading, clipping,
averaging) is right without knowing of any of this.

``update="backward"`` is for speed: what was updated leaves and returns while other things still run, even when user
code runs (`outcore.memory.param_offload.in_flight_params`). It asks that nothing be done to gradients between
``backward()`` and ``step()``; `outcore.memory.param_offload.backward_update_guard` looks at the first steps. From then
on hooks are few, one before the first use of each bucket and one on the last gradient of each, because a small network
takes the host longer than the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from outcore.errors import OutcoreError
from outcore.memory.param_offload.backward_update_guard import BackwardUpdateGuard
from outcore.memory.param_offload.bucketed_step import PartialOptimizer, StateCopies, stepping_for
from outcore.memory.param_offload.buckets import Bucket, Use
from outcore.memory.param_offload.grad_offload import GradientStorage
from outcore.memory.param_offload.hooks import hook_gradients, hook_modules, thin_out
from outcore.memory.param_offload.in_flight_params import InFlightParams
from outcore.memory.param_offload.residency import ParamResidency
from outcore.memory.param_offload.writeback import Writebacks
from outcore.planner.memory.state_policy import StatePolicy

__all__ = ["StateOffloader"]


def _nothing() -> None:
    pass


class StateOffloader(ParamResidency):
    """Keeps the state of one model and its optimizer below the device.

    Args:
        optimizer: that updates the parameters.
        uses: the calls of the model that read parameters, in order (`outcore.memory.param_offload.buckets.uses_of`).
        policy: what lives where.
        device: where the model computes.
        visits: the optimizer's state of the same buckets, which is at home already.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        uses: Sequence[Use],
        policy: StatePolicy,
        device: torch.device,
        visits: StateCopies | None = None,
    ) -> None:
        super().__init__(uses, policy, device)
        self.optimizer, self.stepper = optimizer, PartialOptimizer(optimizer, optimizer.step)
        self.uses, self.late = tuple(uses), InFlightParams()
        self.open = False
        """A pass is under way whose backward may need the parameters as they are."""
        self.watch = BackwardUpdateGuard() if policy.update == "backward" else None
        self.trips = Writebacks(self.buckets, self.copy_streams)
        """Where parameters are updated in backward and have room to stay."""
        self.settings: list[dict[str, Any]] | None = None
        """Of the optimizer when it updated in backward."""
        self.inside = False
        self.called_back = False
        self.visits = visits
        if visits is None and policy.optimizer == "offload":
            self.visits = StateCopies(self.stepper, device, self.copy_streams)
        self.gradients: GradientStorage | None = None
        self.handles: list[Any] = []
        self.needs: list[Any] = []
        """Hooks before modules."""
        self.thin = False
        """Only before those that use a bucket first."""
        self.hooks: dict[int, Any] = {}
        """Parameter (id) -> the hook on its gradient."""
        self._own_step = optimizer.__dict__.get("step")
        try:
            if policy.gradients == "offload":
                self.gradients = GradientStorage(self.buckets, device, self.copy_streams)
            self._take_over()
        except BaseException:
            self.close()
            raise

    def _take_over(self) -> None:
        """From now on state comes and goes by the policy."""
        optimizer = self.optimizer
        if self.policy.parameters == "offload":
            self.needs = hook_modules(self, self.uses)
        if self.watch is not None or self.windowed:
            self.hooks, before = hook_gradients(self, both=self.gradients is not None)
            self.handles += before
        optimizer.step = stepping_for(self)  # type: ignore[method-assign]
        if self.visits is not None:
            settle = weakref.WeakMethod(self.settle)
            self.handles.append(optimizer.register_state_dict_pre_hook(lambda _: (settle() or _nothing)()))
            for bucket in self.buckets:  # what there is already goes home
                if bucket.number not in self.visits.flat_buffers:
                    self.visits.leave(bucket.number, bucket.trained)

    @property
    def fast(self) -> bool:
        """Whether parameters are updated in backward."""
        return self.watch is not None and self.watch.verdict is True

    # Forward

    def around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass; parameters come as they are needed."""
        if self.inside:
            return forward(*args, **kwargs)
        self.enter()
        self.inside = True
        try:
            result = forward(*args, **kwargs)
        except BaseException:
            if not self.open:
                self.go_home()
            self.settle()
            raise
        finally:
            self.inside = False
        self.open = self.open or torch.is_grad_enabled()
        if not self.open:
            self.go_home()
        self.settle()
        return result

    def enter(self) -> None:
        """A forward pass begins: what has left comes back, in the order in which it is needed."""
        self.late.dismiss()
        if self.watch is not None and self.watch.verdict is None:
            self.watch.before_forward(self.buckets)
        if not self.open:  # whatever a backward that failed has left
            self.called_back = False
            for bucket in self.buckets:
                bucket.arrived.clear()
        self.begin()
        if self.thin and not all(
            flat_buffer.here for flat_buffer in self.flat_buffers
        ):  # hooks are too few to bring them one by one
            self.need(*self.buckets)

    def need(self, *buckets: Bucket, backward: bool = False) -> None:
        """The parameters of some buckets are about to be used; what forward needs no more may leave."""
        super().need(*buckets, backward=backward)
        if self.thin and self.inside and self.trips.last in buckets and not (backward or self.asleep):
            if torch.is_grad_enabled():
                self.late.expect(self.trips.leave(), gradients=True)

    def settle(self) -> None:
        """User code runs: everything is complete."""
        self.pause(but=self.late.flat_buffers)
        for others in (self.visits, self.gradients):
            if others is not None:
                others.settle()

    # Backward

    def arriving(self, bucket: Bucket) -> None:
        """A gradient of a bucket is about to be added to what is there."""
        if self.gradients is not None and self.gradients.away(bucket):
            self.need(bucket, backward=True)
            self.gradients.come(bucket)

    def arrived(self, p: torch.Tensor) -> None:
        """Backward has brought the gradient of a parameter, and comes to the bucket before it next."""
        bucket = self.of[id(p)]
        self.late.admit(bucket.weights)
        self._count(bucket, p)
        self.late.admit(self.trips.before.get(bucket))

    def _count(self, bucket: Bucket, p: torch.Tensor) -> None:
        """Do what is to be done when the gradients of a bucket are complete, if they are."""
        if bucket.updated:
            raise OutcoreError(
                'a second backward before optimizer.step(): with update="backward" the first was already applied; '
                'use update="step" to add up gradients over several passes'
            )
        if self.fast:
            if any(q.grad is None for q in bucket.trained):
                return  # the last one of the first steps is not the last one any more: the step does what is left
        else:
            if self.watch is not None:
                self.watch.gradient(bucket, p)
            bucket.arrived.add(id(p))
            if len(bucket.arrived) < len(bucket.trained):
                return
            bucket.arrived.clear()
        if self.fast:
            if self.settings is None:
                self.settings = self.stepper.settings()
            self.update(bucket, then=self.buckets[bucket.number - 1] if bucket.number else None)
            for q in bucket.trained:
                q.grad = None
            bucket.updated = True
        elif self.windowed:
            self._leave_gradients(bucket)

    def _leave_gradients(self, bucket: Bucket) -> None:
        """A bucket is not needed any more in this pass, and its gradients may go home."""
        assert bucket.weights is not None
        home = self.gradients.leave(bucket) if self.gradients is not None else None
        self.release(bucket.weights)
        if home is not None:
            assert self.gradients is not None
            self.gradients.stay(bucket, home)
        if not self.called_back:
            self.called_back = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_is_over)

    def _backward_is_over(self) -> None:
        self.called_back = False
        self.settle()

    def update(self, bucket: Bucket, then: Bucket | None) -> None:
        """Update a bucket and send it home; the state of the next one may start to come."""
        self.need(bucket, backward=True)
        home = None
        if self.gradients is not None and self.gradients.away(bucket):
            home = self.gradients.homes[bucket.number].memory
            self.gradients.come(bucket)
        if self.visits is not None:
            self.visits.arrive(bucket.number, bucket.trained)
            if then is not None:
                self.visits.book(then.number)
        self.stepper.run(bucket.trained)
        if self.visits is not None:
            self.visits.leave(bucket.number, bucket.trained)
        if bucket.weights is not None and self.fast and not self.windowed:
            self.trips.updated(bucket)
        elif bucket.weights is not None:
            bucket.weights.send()
            if self.windowed:
                self.depart(bucket.weights)
        if home is not None:
            assert self.gradients is not None
            self.gradients.stay(bucket, home)

    # The optimizer's step

    def step(self) -> None:
        """Do what is left of the optimizer's step."""
        fast = self.fast
        self.late.receive()  # whatever backward has not come to
        if fast:
            self.stepper.refuse_changes(self.settings)
        elif self.watch is not None and self.watch.verdict is None:
            self.watch.before_step(self.buckets)
        waiting = [
            bucket for bucket in self.buckets if not bucket.updated and any(p.grad is not None for p in bucket.trained)
        ]
        if self.windowed:
            waiting.reverse()  # the first ones are then here when forward begins
        for i, bucket in enumerate(waiting):
            self.update(bucket, then=waiting[i + 1] if i + 1 < len(waiting) else None)
            for p in bucket.trained if fast else ():
                p.grad = None
        self.trips.complete()
        self.stepper.rest(self.of.keys())
        for bucket in self.buckets:
            bucket.updated = False
            bucket.arrived.clear()
        self.open, self.settings = False, None
        if not fast or self.windowed:
            self.go_home()
            self.settle()
        else:
            coming = [
                flat_buffer for flat_buffer in self.flat_buffers if flat_buffer.arriving
            ]  # whether it is back takes longer to ask
            self.pause(but=coming)
            self.late.expect(coming)  # what is still coming must not meet what user code writes
        if self.watch is not None and not fast:
            self.watch.after_step(self.buckets)
            if self.fast:
                thin_out(self, self.watch.last.values())

    # The end

    def close(self) -> None:
        """Everything is on the device again, in ordinary tensors; hooks are gone."""
        self.late.receive()
        self.go_home()
        for handle in (*self.handles, *self.needs, *self.hooks.values()):
            handle.remove()
        for flat_buffer in self.flat_buffers:
            for member in flat_buffer.members:
                grad, member.tensor.grad = member.tensor.grad, None
                member.tensor.data = member.tensor.data.to(self.device, copy=True)
                if grad is not None:
                    member.tensor.grad = grad.to(self.device, copy=self.gradients is not None)
        for others in (self.visits, self.gradients):
            if others is not None:
                others.close()
        if self._own_step is None:
            self.optimizer.__dict__.pop("step", None)
        else:
            self.optimizer.step = self._own_step  # type: ignore[method-assign]
        self.copy_streams.close()
        if self.home is not None:
            self.home.close()
        self.buckets, self.uses, self.handles, self.calls, self.of = [], (), [], {}, {}
        self.trips = Writebacks((), self.copy_streams)
