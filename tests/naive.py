"""One decode step of one row and one head in plain Python floats, written from the math and nothing else."""

from __future__ import annotations

import math
from typing import Any

D = 128


def sigmoid(a: float) -> float:
    return 1 / (1 + math.exp(-a)) if a > -700 else 0.0


def step(a: dict[str, Any], row: int, head: int) -> dict[str, Any]:
    """o before and after the norm, the new state [v][k] and the new window [section][channel][tap]."""
    heads = a["state"].size(1)
    slot = int(a["state_indices"][row])
    qkv, window = [], []
    for section in range(3):
        values, taps = [], []
        for i in range(D):
            packed = section * heads * D + head * D + i
            old = [float(a["conv_state"][slot, packed, t]) for t in range(3)]
            new = float(a["x"][row, packed])
            y = float(a["bias"][packed]) if a["bias"] is not None else 0.0
            for t, value in enumerate([*old, new]):
                y += value * float(a["weight"][section, t, head * D + i])
            values.append(y * sigmoid(y))
            taps.append([old[1], old[2], new])
        qkv.append(values)
        window.append(taps)
    q, k, v = qkv
    q_norm = math.sqrt(sum(value * value for value in q) + 1e-6) * math.sqrt(D)
    k_norm = math.sqrt(sum(value * value for value in k) + 1e-6)
    q = [value / q_norm for value in q]
    k = [value / k_norm for value in k]
    rate = math.exp(float(a["A_log"][head]))
    decay = []
    for i in range(D):
        g = float(a["raw_g"][0, row, head, i]) + float(a["dt_bias"][head * D + i])
        if a["lower_bound"] is not None:
            decay.append(math.exp(a["lower_bound"] * sigmoid(rate * g)))
        else:
            softplus = g + math.log1p(math.exp(-g)) if g > 0 else math.log1p(math.exp(g))
            decay.append(math.exp(-rate * softplus))
    beta = sigmoid(float(a["raw_beta"][0, row, head]))
    state, o = [], []
    for r in range(D):
        s = [value * d for value, d in zip(a["state"][slot, head, r].tolist(), decay, strict=True)]
        delta = beta * (v[r] - sum(x * y for x, y in zip(s, k, strict=True)))
        s = [x + delta * y for x, y in zip(s, k, strict=True)]
        state.append(s)
        o.append(sum(x * y for x, y in zip(s, q, strict=True)))
    out = o
    if a["norm_weight"] is not None:
        inverse_rms = 1 / math.sqrt(sum(value * value for value in o) / D + a.get("norm_eps", 1e-5))
        gate = a["output_gate"].reshape(-1, heads, D)[row, head].tolist()
        out = [
            value * inverse_rms * w * sigmoid(g) for value, w, g in zip(o, a["norm_weight"].tolist(), gate, strict=True)
        ]
    return {"out": out, "unnormed": o, "state": state, "window": window}
