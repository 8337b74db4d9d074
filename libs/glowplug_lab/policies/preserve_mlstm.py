"""The multiplicative LSTM of PreServe's workload predictor, forward and backward, in numpy.

Paper: PreServe section 4.1, which takes the mLSTM of Krause et al. (2016). For one step, with input x and state h, c:

    m = (W_mx x) * (W_mh h)                        the multiplicative transition of an mRNN
    z = tanh(W_zx x + W_zm m + b_z)                candidate
    i, f, o = sigmoid(W_.x x + W_.m m + b_.)       input, forget and output gate
    c = f * c + i * z
    h = o * tanh(c)

The answer is linear in the last h. Sizes: B samples, k steps, X inputs, H hidden. Training minimises the mean absolute
error (the paper scores absolute percentage errors) by Adam over whole batches, gradients clipped.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = dict[str, Array]

CLIP: Final = 1.0
BETA_1, BETA_2, TINY = 0.9, 0.999, 1e-8


def draw_weights(num_inputs: int, num_hidden: int, seed: int) -> Weights:
    """Forget gates start open; the output layer at 0."""
    chance = np.random.default_rng(seed)
    bound = 1.0 / np.sqrt(num_hidden)

    def uniform(*shape: int) -> Array:
        return chance.uniform(-bound, bound, shape)

    bias = np.zeros(4 * num_hidden)
    bias[2 * num_hidden : 3 * num_hidden] = 1.0
    return {
        "mx": 1.0 + uniform(num_inputs, num_hidden),
        "mh": uniform(num_hidden, num_hidden),
        "gx": uniform(num_inputs, 4 * num_hidden),  # candidate, input, forget, output
        "gm": uniform(num_hidden, 4 * num_hidden),
        "gb": bias,
        "yw": np.zeros(num_hidden),
        "yb": np.zeros(1),
    }


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def predict(weights: Weights, inputs: Array) -> Array:
    """(B, k, X) -> (B,)."""
    return _forward(weights, inputs)[0]


def _forward(weights: Weights, inputs: Array) -> tuple[Array, list[Any]]:
    num_samples, num_steps, _ = inputs.shape
    num_hidden = len(weights["yw"])
    hidden = np.zeros((num_samples, num_hidden))
    cell = np.zeros((num_samples, num_hidden))
    steps: list[Any] = []
    for at in range(num_steps):
        x = inputs[:, at]
        from_x, from_h = x @ weights["mx"], hidden @ weights["mh"]
        middle = from_x * from_h
        gates = x @ weights["gx"] + middle @ weights["gm"] + weights["gb"]
        candidate = np.tanh(gates[:, :num_hidden])
        opened = _sigmoid(gates[:, num_hidden:])
        into, keep, out = np.split(opened, 3, axis=1)
        before, was = cell, hidden
        cell = keep * before + into * candidate
        bent = np.tanh(cell)
        hidden = out * bent
        steps.append((x, was, from_x, from_h, middle, candidate, into, keep, out, before, bent))
    return hidden @ weights["yw"] + weights["yb"][0], [*steps, hidden]


def gradients(weights: Weights, inputs: Array, answers: Array) -> tuple[float, Weights]:
    """Mean absolute error and its gradient."""
    found, trail = _forward(weights, inputs)
    error = found - answers
    loss = float(np.abs(error).mean())
    slope = np.sign(error) / len(error)
    hidden = trail.pop()
    grads = {name: np.zeros_like(value) for name, value in weights.items()}
    grads["yw"] = slope @ hidden
    grads["yb"] = np.array([slope.sum()])
    d_hidden = slope[:, None] * weights["yw"][None]
    d_cell = np.zeros_like(d_hidden)
    for x, was, from_x, from_h, middle, candidate, into, keep, out, before, bent in reversed(trail):
        d_cell = d_cell + d_hidden * out * (1 - bent * bent)
        d_gates = np.concatenate(
            (
                d_cell * into * (1 - candidate * candidate),
                d_cell * candidate * into * (1 - into),
                d_cell * before * keep * (1 - keep),
                d_hidden * bent * out * (1 - out),
            ),
            axis=1,
        )
        grads["gx"] += x.T @ d_gates
        grads["gm"] += middle.T @ d_gates
        grads["gb"] += d_gates.sum(0)
        d_middle = d_gates @ weights["gm"].T
        grads["mx"] += x.T @ (d_middle * from_h)
        grads["mh"] += was.T @ (d_middle * from_x)
        d_hidden = (d_middle * from_x) @ weights["mh"].T
        d_cell = d_cell * keep
    return loss, grads


@dataclass(slots=True)
class Trainer:
    """Adam. `weights` are replaced, never changed in place."""

    weights: Weights
    learning_rate: float = 0.01
    decay: float = 0.0  # per step
    num_steps: int = 0
    _first: Weights | None = None
    _second: Weights | None = None

    def step(self, inputs: Array, answers: Array, rate: float = 1.0) -> float:
        """Return the loss before the step. `rate`: share of the learning rate."""
        loss, grads = gradients(self.weights, inputs, answers)
        norm = float(np.sqrt(sum(float((g * g).sum()) for g in grads.values())))
        shrink = min(1.0, CLIP / max(norm, TINY))
        self.num_steps += 1
        first = self._first or {name: np.zeros_like(g) for name, g in grads.items()}
        second = self._second or {name: np.zeros_like(g) for name, g in grads.items()}
        self._first = {n: BETA_1 * first[n] + (1 - BETA_1) * g * shrink for n, g in grads.items()}
        self._second = {n: BETA_2 * second[n] + (1 - BETA_2) * (g * shrink) ** 2 for n, g in grads.items()}
        pace = self.learning_rate * rate
        fix_1, fix_2 = 1 - BETA_1**self.num_steps, 1 - BETA_2**self.num_steps
        self.weights = {
            n: value * (1 - pace * self.decay)
            - pace * (self._first[n] / fix_1) / (np.sqrt(self._second[n] / fix_2) + TINY)
            for n, value in self.weights.items()
        }
        return loss
