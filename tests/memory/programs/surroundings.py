"""What is around a model: autocast, checkpoints, other models, threads, what changes before backward, odd arguments."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .effects import block
from .loops import convolutions, deep
from .run import Run, images, program, rows, variants


@variants(mixed=torch.bfloat16, off=None)
def autocast_that_comes_and_goes(run: Run, dtype: torch.dtype | None) -> None:
    model = run.manage(deep(), (rows(0),))
    for step in range(4):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None and step % 2 == 1):
            loss = model(rows(step)).float().square().mean()
        loss.backward()
        run.note(loss)
        run.note_model(model)


@program
def autocast_inside_forward(run: Run) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.on = block(), block(), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.on):
                x = torch.relu(self.a(x))
                with torch.autocast("cpu", enabled=False):
                    x = x.float().exp().log1p()
                x = self.b(x)
            return x.float() + 1

    model = run.manage(Mixed(), (rows(0),))
    run.train(model, rows, steps=4, before=lambda i: setattr(model, "on", i != 2))


@program
def a_gradient_scaler(run: Run) -> None:
    model = run.manage(deep(), (rows(0),))
    optimizer, scaler = torch.optim.Adam(model.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(rows(step) * (1e30 if step == 1 else 1)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        run.note(scaler.get_scale())
        run.note_model(model)


@variants(new=False, old=True)
def checkpoints_inside(run: Run, reentrant: bool) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(block(), nn.Dropout(0.2), nn.ReLU()) for _ in range(3)])
            self.out, self.gradient_checkpointing = nn.Linear(8, 4), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_() if reentrant else x
            for layer in self.layers:
                if self.gradient_checkpointing:
                    x = checkpoint(layer, x, use_reentrant=reentrant)
                else:
                    x = layer(x)
            return self.out(torch.tanh(x))

    model = run.manage(Blocks(), (rows(0),))
    run.train(model, rows, steps=4, before=lambda i: setattr(model, "gradient_checkpointing", i != 1))


@variants(new=False, old=True)
def checkpointed_as_a_whole(run: Run, reentrant: bool) -> None:
    model = run.manage(deep(), (rows(0).requires_grad_(),))
    for step in range(3):
        model.zero_grad()
        loss = checkpoint(model, rows(step).requires_grad_(), use_reentrant=reentrant).square().mean()
        loss.backward()
        run.note(loss)
        run.note_model(model)


@program
def checkpointed_in_segments(run: Run) -> None:
    model = run.manage(deep(), (rows(0),))
    for step in range(2):
        model.zero_grad()
        loss = checkpoint_sequential(model, 2, rows(step), use_reentrant=False).square().mean()
        loss.backward()
        run.note(loss)
        run.note_model(model)


@program
def saved_tensors_of_somebody_else(run: Run) -> None:
    model = run.manage(convolutions(), (images(0),))
    for step in range(3):
        model.zero_grad()
        with torch.autograd.graph.save_on_cpu():
            loss = model(images(step)).square().mean()
        loss.backward()
        run.note(loss)
        run.note_model(model)


@program
def deepcopied_pickled_and_loaded(run: Run) -> None:
    model = run.manage(convolutions(), (images(0),))
    run.train(model, images, steps=1)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    other = copy.deepcopy(model)
    run.train(other, images, steps=2)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True))
    run.train(model, images, steps=2)
    run.note_model(other)


@program
def models_in_threads(run: Run) -> None:
    models = [run.manage(deep(), (rows(0),)) for _ in range(3)]

    def work(i: int) -> None:
        for step in range(3):
            models[i](rows(step + i)).square().mean().backward()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.note_model(*models)


@program
def a_managed_model_inside_another(run: Run) -> None:
    inner = run.manage(deep(), (rows(0),))
    model = run.manage(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), inner, nn.Tanh(), nn.Linear(8, 4)), (rows(0),))
    run.train(model, rows)


@program
def a_shared_backbone(run: Run) -> None:
    backbone = deep()
    first = run.manage(nn.Sequential(backbone, nn.ReLU(), nn.Linear(8, 3)), (rows(0),))
    second = run.manage(nn.Sequential(backbone, nn.Sigmoid(), nn.Linear(8, 2)), (rows(0),))
    for step in range(3):
        first.zero_grad(), second.zero_grad()
        loss = first(rows(step)).square().mean() + second(rows(step + 1)).square().mean()
        loss.backward()
        run.note(loss)
        run.note_model(first, second)


@program
def tied_weights(run: Run) -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(12, 8), deep()
            self.out = nn.Linear(8, 12, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits = self.out(self.body(self.embed(tokens)))
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    tokens = torch.randint(12, (3, 7), generator=torch.Generator().manual_seed(5))
    model = run.manage(Language(), (tokens,))
    run.train(model, lambda i: tokens.roll(i, 1), loss=lambda value: value)


@program
def evaluation_between(run: Run) -> None:
    model = run.manage(convolutions(), (images(0),))
    for step in range(3):
        run.train(model.train(), images, steps=1)
        with torch.no_grad():
            run.note(model.eval()(images(step, batch=5)))
        with torch.inference_mode():
            run.note(model(images(step)).clone())
        loss = model(images(step)).square().mean()  # with gradients, norms in eval mode
        model.train()
        model(images(step + 1))  # which changes the running statistics
        model.zero_grad()
        loss.backward()
        run.note_model(model)


@program
def settings_that_change_before_backward(run: Run) -> None:
    model = run.manage(convolutions(), (images(0),))
    for step in range(3):
        model.zero_grad()
        loss = model.train()(images(step)).square().mean()
        model.eval()
        model[3].p = 0.5
        model[1].eps, model[6].momentum = 1e-3, 0.5
        model[2].inplace = False
        loss.backward()
        model[3].p = 0.1
        run.note(loss)
        run.note_model(model)


@program
def biases_that_change_before_backward(run: Run) -> None:
    """Plain training does not mind: backward of a layer does not need its bias."""
    model = run.manage(deep(), (rows(0),))
    for step in range(3):
        model.zero_grad()
        loss = model(rows(step)).square().mean()
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.bias.data = layer.bias.data + 0.5
        loss.backward()
        run.note(loss)
        run.note_model(model)


@program
def inputs_overwritten_after_forward(run: Run) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.out = nn.Parameter(torch.zeros(8)), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.sigmoid(self.bias + self.bias.exp()) * 2) + x.sum()

    model = run.manage(Sum(), (rows(0),))
    place = rows(0)
    for step in range(3):
        place.copy_(rows(step))
        model.zero_grad()
        loss = model(place).square().mean()
        place.zero_()
        loss.backward()
        run.note(loss)
        run.note_model(model)


@program
def anomaly_detection(run: Run) -> None:
    model = run.manage(convolutions(), (images(0),))
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        run.train(model, images, steps=2)


@program
def only_some_gradients(run: Run) -> None:
    model = run.manage(deep(), (rows(0),))
    for step in range(3):
        loss = model(rows(step)).square().mean()
        run.note(*torch.autograd.grad(loss, [model[0][0].weight, model[4][3].bias]))


@program
def complex_and_double(run: Run) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))
            self.out = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spectrum = torch.fft.rfft(x) @ self.weight
            return self.out(torch.tanh(torch.fft.irfft(spectrum, n=8)) * 2)

    model = run.manage(Spectral(), (rows(0),))
    run.train(model, rows)


@program
def attention_with_masks(run: Run) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
            self.mlp, self.causal = block(), True

        def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
            h, size = self.norm(x), x.shape[1]
            mask = torch.ones(size, size, dtype=torch.bool).triu(1) if self.causal else None
            h, weights = self.attention(h, h, h, key_padding_mask=padding, attn_mask=mask, need_weights=True)
            self.weights = weights.detach()
            return x + self.mlp(x + h)

    model = run.manage(Attends(), (torch.randn(2, 5, 8),))

    def batch(step: int) -> Any:
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(step))
        return (x, torch.arange(5).expand(2, 5) >= 4) if step % 2 else x

    run.train(model, batch, steps=4, before=lambda i: setattr(model, "causal", i < 2))
    run.note(model.weights)


@program
def a_model_that_is_released_and_managed_again(run: Run) -> None:
    import outcore

    model = run.manage(convolutions(), (images(0),))
    run.train(model, images, steps=1)
    outcore.release(model)
    run.train(model, images, steps=1)
    run.manage(model, (images(0, batch=3),))
    run.train(model, images, steps=2)


@program
def a_model_without_blocks(run: Run) -> None:
    class Formula(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor, *, power: float = 2.0) -> torch.Tensor:
            y = (x * self.a).exp().clamp(max=5.0)
            z = (y @ self.b).sigmoid() ** power
            return torch.where(z > 0.5, z, y.sqrt()).cumsum(1)

    model = run.manage(Formula(), (rows(0),), {"power": 2.0})
    run.train(model, rows)


@program
def arguments_by_name(run: Run) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.relu, self.drop = block(), nn.ReLU(inplace=True), nn.Dropout(0.3)

        def forward(self, *, pixels: torch.Tensor, extra: dict[str, Any] | None = None) -> torch.Tensor:
            x = self.relu(input=self.net(pixels))
            x = self.drop(input=x)
            return x * (extra or {}).get("scale", 1.0) + F.relu(input=x, inplace=False)

    model = run.manage(Named(), (), {"pixels": rows(0)})
    for step in range(4):
        model.zero_grad()
        loss = model(pixels=rows(step), extra={"scale": 1.0 + step} if step else None).square().mean()
        loss.backward()
        run.note(loss)
        run.note_model(model)
