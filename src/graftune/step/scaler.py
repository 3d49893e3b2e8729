"""The dynamic loss scale of fp16, which keeps small gradients from underflowing.

The loss's gradient is multiplied by the scale, and the parameters' gradients are divided by it. An update whose
gradients overflow is skipped and halves the scale; 2,000 good ones in a row double it. torch's GradScaler reads the
overflow flag on the host at every step. Here scale and count are two numbers on the device, so the host never waits and
a captured graph updates them. A training step passes `state` to `grad_norm.clip`, which unscales by its factors and
updates the state in the same launch. The methods here do the same for a user's own loop:

    scaler.scaled(loss).backward()
    ok = scaler.unscale_(gradients)     # 0-dim flag, on the device
    ...                                 # update where ok
    scaler.update(ok)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from graftune.errors import GraftuneError
from graftune.kernels import grad_norm
from graftune.kernels.grad_norm.reference import LEAST_SCALE, MOST_SCALE


class LossScaler:
    """The dynamic loss scale of fp16. Its state is on the device, and no method waits for the device. Skip an update
    whose gradients overflow: that halves the scale; 2,000 good updates in a row double it.

    Example:
        scaler = graftune.LossScaler("cuda")
        scaler.scaled(loss).backward()
        ok = scaler.unscale_(gradients)
        scaler.update(ok)
    """

    def __init__(self, device: torch.device | str = "cpu", start: float = MOST_SCALE):
        if not LEAST_SCALE <= start <= MOST_SCALE:
            raise GraftuneError(
                f"a loss scale of {start:g} is out of range", fix=f"take one of {LEAST_SCALE:g} to {MOST_SCALE:g}"
            )
        self.state = torch.tensor([start, 0.0], device=device)  # scale, good updates since it last changed

    @property
    def scale(self) -> torch.Tensor:
        """0-dim fp32 on the device: a view, so it always shows the current scale."""
        return self.state[0]

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """x times the scale, in x's dtype. Computed in fp32, because 65536 is infinite in fp16."""
        return (x.float() * self.scale).to(x.dtype)

    @torch.no_grad()
    def unscale_(self, grads: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor:
        """Divide the gradients in place; returns whether all were finite."""
        every = [grads] if isinstance(grads, torch.Tensor) else list(grads)
        ok = torch.ones((), dtype=torch.bool, device=self.state.device)
        for grad in every:
            ok &= torch.isfinite(grad).all()
            grad.copy_(grad.float() / self.scale)
        return ok

    @torch.no_grad()
    def update(self, ok: torch.Tensor) -> None:
        """Adjust the scale after an update that was applied (ok) or skipped (not ok)."""
        grad_norm.rescale(self.state, ok)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of the state, for a checkpoint."""
        return {"loss_scale": self.state.clone()}

    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore the state in place, since a captured graph reads that memory. Waits for the device."""
        state = saved.get("loss_scale")
        if state is None or state.shape != (2,) or not LEAST_SCALE <= float(state[0]) <= MOST_SCALE:
            raise GraftuneError(
                f"this is not a saved loss scale: {state}",
                where="loss_scale",
                fix="load what LossScaler.state_dict returned",
            )
        self.state.copy_(state)
