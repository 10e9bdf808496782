"""Oracle of distillation."""

import math

import numpy as np

from tests.oracle.base import f64
from tests.oracle.divergences import masked, softmax


def _kl(p, q):
    return sum(a * (math.log(a / b) if b > 0 else math.inf) for a, b in zip(p, q, strict=True) if a > 0)


def _divergence(teacher, student, beta):
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    mixture = [beta * t + (1 - beta) * s for t, s in zip(teacher, student, strict=True)]
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def gkd(student_logits, teacher_logits, mask=None, *, beta=0.5, temperature=1.0):
    s, t = f64(student_logits) / temperature, f64(teacher_logits) / temperature
    out = np.zeros(s.shape[:-1])
    for row in np.ndindex(out.shape):
        out[row] = _divergence(softmax(t[row]), softmax(s[row]), beta)
    return masked(out, mask)


def top_k_distillation(
    student_logits, teacher_logprobs, teacher_tokens, mask=None, *, beta=0.0, temperature=1.0, tail="bucket"
):
    s = f64(student_logits) / temperature
    out = np.zeros(s.shape[:-1])
    for row in np.ndindex(out.shape):
        present = teacher_tokens[row] != -1
        student = softmax(s[row])[teacher_tokens[row][present]]
        teacher = np.exp(f64(teacher_logprobs[row][present]))
        if tail == "bucket":
            student, teacher = ([*x, 1 - x.sum()] for x in (student, teacher))
        elif tail == "renormalise":
            student, teacher = (x / x.sum() for x in (student, teacher))
        out[row] = _divergence(teacher, student, beta)
    return masked(out, mask)


def distillation_advantages(logprobs, teacher_logprobs, mask=None, *, clip=None):
    advantages = f64(teacher_logprobs) - f64(logprobs)
    return masked(advantages if clip is None else np.clip(advantages, -clip, clip), mask)


def on_policy_distillation(logprobs, teacher_logprobs, mask=None, *, clip=None):
    return -distillation_advantages(logprobs, teacher_logprobs, mask, clip=clip) * f64(logprobs)
