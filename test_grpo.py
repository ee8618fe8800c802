# SPDX-License-Identifier: MIT
"""python -m pytest: every number that the two books print, the mathematics, the program.

Expected values are printed by a source named beside them, or computed here in numpy from the
definitions, never by the code under test.
"""

import contextlib
import copy
import functools
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import grpo
import rewards

torch.set_num_threads(1)

SURROGATES = ("reinforce", "sequence", "token", "gspo", "cispo")
PER_COMPLETION = ("sequence", "gspo")
AGGREGATES = ("sum", "mean", "token", "constant")
ESTIMATORS = ("k1", "k2", "k3", "weighted")
MAX_LEN = 9  # for the "constant" aggregation
EOS, PAD = 256, 257  # of the byte tokenizer


def policy(logps, *args, **settings):
    """grpo.policy_loss -> (loss, its gradient by logps, stats) in numpy and floats."""
    logps = torch.as_tensor(logps).clone().requires_grad_()
    loss, stats = grpo.policy_loss(logps, *args, **settings)
    loss.backward()
    stats = {name: float(stats[name]) for name in ("ratio_mean", "ratio_max", "clip_frac")}
    return loss.item(), logps.grad.numpy(), stats


def kl(logps, *args, **settings):
    """grpo.kl_loss -> (loss, its gradient by logps)."""
    logps = torch.as_tensor(logps).clone().requires_grad_()
    loss = grpo.kl_loss(logps, *args, **settings)
    loss.backward()
    return loss.item(), logps.grad.numpy()


def parameter_gradients(model, loss):
    """All of them in one vector."""
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def enlarged(model):
    """Weights of the usual size hide faults of mask and position within the tolerance."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(8)
    return model.eval()


def qwen(**config):
    """Rotary positions."""
    torch.manual_seed(0)
    config = dict(vocab_size=60, eos_token_id=None, bos_token_id=None, pad_token_id=None) | config
    return enlarged(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, **config)))


def gpt2(dropout=0.0, **config):
    """Learned positions."""
    torch.manual_seed(0)
    config = dict(vocab_size=60, eos_token_id=None, bos_token_id=None, pad_token_id=None) | config
    return enlarged(transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, n_positions=128, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, **config)))


def byte_tokenizer():
    return grpo.tiny_policy()[1]


def script(monkeypatch, model, completions):
    """Let model.generate write these completions; returns what it was called with."""
    seen = []

    def generate(*args, **settings):
        prompts = args[0] if args else settings.get("inputs", settings.get("input_ids"))
        seen.append(SimpleNamespace(prompts=prompts, config=model.generation_config, **settings))
        return torch.cat([prompts, torch.tensor(completions)], 1)

    monkeypatch.setattr(model, "generate", generate)
    return seen


def spy(monkeypatch, model):
    """Let model.generate also keep its scores and logits, (B, T, V), and the training flag."""
    generate, seen = model.generate, []

    def kept(*args, **settings):
        wanted = settings.get("return_dict_in_generate")
        out = generate(*args, **settings | dict(
            output_scores=True, output_logits=True, return_dict_in_generate=True))
        seen.append(SimpleNamespace(
            training=model.training, scores=torch.stack(out.scores, 1).double(),
            logits=torch.stack(out.logits, 1).double()))
        return out if wanted else out.sequences

    monkeypatch.setattr(model, "generate", kept)
    return seen


# ==== 1. What the two books print =================================================================
# Every number that a reader can check against a page, by the function that computes it here.

# Second book, 7.4: four completions, one log-probability each.
NEW = torch.tensor([[-7.9243], [-20.1546], [-16.6130], [-23.3677]], dtype=torch.float64)
OLD = torch.tensor([[-10.9243], [-20.3546], [-14.6130], [-23.3677]], dtype=torch.float64)
ONE_EACH = torch.ones(4, 1, dtype=torch.bool)


def group(values, **settings):
    """Advantages of one group, (G,) float64."""
    return grpo.group_advantages(torch.tensor([values], dtype=torch.float64), **settings)[0]


@pytest.mark.parametrize("text, points", [("", 0), ("42", 0), ("<answer>42", 1),
                                          ("<answer>42</answer>", 3)])
def test_first_book_scores_answer_tags_0_1_3(text, points):
    assert rewards.tags_reward(completions=[text]) == [points]


def test_first_book_advantages_follow_its_code_line_not_its_population_example():
    r = np.array([3, 1, 0, 3, 0, 1, 3, 3.0])
    assert r.mean() == 1.75
    assert r.std() == pytest.approx(1.2990381, abs=1e-7)
    assert r.std(ddof=1) == pytest.approx(1.3887301, abs=1e-7)
    population = (r - r.mean()) / r.std()  # the reading notes' +0.96, -0.58, -1.35
    assert population[:3] == pytest.approx([0.9622504, -0.5773503, -1.3471506], abs=1e-7)
    ours = group(r.tolist())  # the code line beside it: unbiased, eps 1e-4
    assert ours[:3].tolist() == pytest.approx([0.9000381, -0.5400228, -1.2600533], abs=1e-7)
    assert ours.numpy() == pytest.approx((r - r.mean()) / (r.std(ddof=1) + 1e-4), rel=1e-12)


def test_second_book_advantages_are_plus_minus_0_8659():
    ours = group([1, 1, 0, 0])
    a = 0.8658754298
    assert ours.tolist() == pytest.approx([a, a, -a, -a], abs=1e-10)
    assert ours.std().item() == pytest.approx(0.9998268, abs=1e-7)  # not quite 1: eps


def test_second_book_reinforce_loss_is_minus_2_5764():
    loss, _, _ = policy(NEW, OLD, group([1, 1, 0, 0]), ONE_EACH, "reinforce")
    assert loss == pytest.approx(-2.5763690475, abs=1e-9)


def test_second_book_ratios_average_5_6106_before_the_clip():
    _, _, stats = policy(NEW, OLD, group([1, 1, 0, 0]), ONE_EACH, "sequence", 10)
    ratios = np.exp((NEW - OLD).numpy()[:, 0])
    assert ratios == pytest.approx([20.085537, 1.221403, 0.135335, 1], abs=1e-6)
    assert ratios.clip(-9, 11) == pytest.approx([11, 1.221403, 0.135335, 1], abs=1e-6)
    assert stats["ratio_mean"] == pytest.approx(5.6105687411, abs=1e-9)
    assert stats["ratio_max"] == pytest.approx(20.085537, abs=1e-6)
    assert stats["clip_frac"] == 0.25


def test_second_book_clipped_loss_is_minus_2_3998_with_its_gradient():
    loss, gradient, _ = policy(NEW, OLD, group([1, 1, 0, 0]), ONE_EACH, "sequence", 10)
    assert loss == pytest.approx(-2.3997883598, abs=1e-9)
    assert gradient[:, 0] == pytest.approx([0, -0.26440, 0.02930, 0.21647], abs=5e-6)


def test_clipping_took_45_percent_off_the_like_for_like_loss():
    A = group([1, 1, 0, 0])
    unclipped, _, _ = policy(NEW, OLD, A, ONE_EACH, "sequence")
    clipped, _, _ = policy(NEW, OLD, A, ONE_EACH, "sequence", 10)
    assert unclipped == pytest.approx(-4.3665241568, abs=1e-9)  # the book does not print it
    assert 1 - clipped / unclipped == pytest.approx(0.45, abs=0.005)


@pytest.mark.parametrize("group_rewards, eps, ppo, clip_only, one_sided", [
    ([1, 1, 0, 0], 10, -2.399788, -2.399788, -2.399788),  # the book's: fits all three rules
    ([1, 1, 0, 0], 0.2, -0.129881, -0.129881, -0.273761),
    ([0, 0, 1, 1], 10, 4.366524, 2.399788, 2.399788),
    ([0, 0, 1, 1], 0.2, 4.366524, 0.129881, 0.273761),
])
def test_the_clip_rule_is_ppos_min(group_rewards, eps, ppo, clip_only, one_sided):
    A = group(group_rewards)
    r, a = np.exp((NEW - OLD).numpy()[:, 0]), A.numpy()
    assert -(r.clip(1 - eps, 1 + eps) * a).mean() == pytest.approx(clip_only, abs=1e-6)
    assert -(np.minimum(r, 1 + eps) * a).mean() == pytest.approx(one_sided, abs=1e-6)
    loss, _, _ = policy(NEW, OLD, A, ONE_EACH, "sequence", eps)
    assert loss == pytest.approx(ppo, abs=1e-6)


def test_the_lower_bound_of_eps_10_never_acts():
    # It is -9. A bad completion keeps its full gradient at any ratio, e^-5 and e^3 alike.
    log_ratio = torch.tensor([[-5.0], [3.0]], dtype=torch.float64)
    A, mask = torch.tensor([-1.0, -1.0]), torch.ones(2, 1, dtype=torch.bool)
    _, gradient, stats = policy(log_ratio, log_ratio * 0, A, mask, "sequence", 10)
    assert gradient[:, 0] == pytest.approx(np.exp([-5, 3]) / 2)
    assert stats["clip_frac"] == 0


class Fixed(torch.nn.Module):
    """A language model with the same logits everywhere."""

    device = torch.device("cpu")

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, input_ids, attention_mask, position_ids, **unused):  # it needs all three
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


def test_first_books_log_probabilities_and_entropy_of_seven_logits():
    model = Fixed([0.6667, -2, 1.3333, 0, -0.6667, 2, -1.3333])
    input_ids = torch.tensor([[0, token] for token in range(7)])
    logps, entropy = grpo.token_logps(model, input_ids, torch.ones_like(input_ids), 1)
    printed = [-2.0441953, -4.7108953, -1.3775953, -2.7108953, -3.3775953, -0.7108953, -4.0441953]
    assert logps[:, 0].tolist() == pytest.approx(printed, abs=1e-6)
    assert entropy[:, 0].tolist() == pytest.approx([1.3700344579] * 7, abs=1e-6)


@pytest.mark.parametrize("estimator, value", [("k1", 0.3), ("k2", 1.63), ("k3", 1.6143934801)])
def test_kl_estimates_on_the_second_books_vectors(estimator, value):
    assert kl(NEW, OLD, ONE_EACH, estimator)[0] == pytest.approx(value, abs=1e-9)


def test_think_tags_become_one_token_each_within_the_rows_the_embedding_has(monkeypatch):
    # As in Qwen3-0.6B-Base: "<think>" is 3 pieces; added, it is the id after the last, and
    # there are 151936 embedding rows for 151669 ids. Here: 64 rows for 8 ids.
    words = {word: i for i, word in enumerate(["<", "</", "think", ">", "2", "+", "<eos>", "?"])}
    words = Tokenizer(models.WordLevel(words, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    model = qwen(vocab_size=64)
    text = "<think>2+2</think>"
    assert tokenizer(text)["input_ids"] == [0, 2, 3, 4, 5, 4, 1, 2, 3]

    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    assert tokenizer(text)["input_ids"] == [8, 4, 5, 4, 9]
    assert len(tokenizer) == 10 <= model.get_input_embeddings().num_embeddings
    script(monkeypatch, model, [[8, 4, 5, 4, 9, 6]])
    rollout = grpo.sample(model, tokenizer, [text], 1, 6)
    assert rollout.texts[0].replace(" ", "") == text  # the tags survive, the EOS does not
    logps, _ = grpo.token_logps(model, rollout.input_ids, rollout.attention_mask, 6)
    assert logps.isfinite().all()


# ==== 2. Reasons ==================================================================================
# Why the terms do what they do, on policies small enough to enumerate every outcome, in float64.
# A table holds the log-probabilities of the tokens of every outcome: (outcomes, tokens).
# Expectations are sums over outcomes; the right gradients are autograd's, of closed forms.


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


# One token of four: the policy, the reference, and another policy that samples.
PI, REF, MU = f64(2, 1, 0, -1), f64(0, 2, -1, 2), f64(0, 0.3, 0.8, -0.6)
# Two tokens of three: row 0 holds the first token's logits, row 1 + a the second's after a.
PI2 = f64([1, 0, -1], [0, 1, 0], [0, 2, 0], [2, 0, 1])
REF2 = f64([0, 1, 0], [0, 1, 0], [0, 1, 0], [0, 1, 0])
MU2 = f64([0, 0, 0.5], [0, 0.5, 0], [0, 0, 0.5], [0.5, 0, 0])


def table(logits, whole=False):  # whole: the sequence as a single token
    if logits.dim() == 1:
        return logits.log_softmax(0)[:, None]
    logps = logits.log_softmax(1)
    rows = torch.stack([logps[0][:, None].expand(3, 3), logps[1:]], 2).reshape(9, 2)
    return rows.sum(1, keepdim=True) if whole else rows


def gradient_of(function, at):
    at = at.clone().requires_grad_()
    return torch.autograd.grad(function(at), at)[0]


def gradient_of_kl(logits, p, q):  # KL(p || q) of whole outcomes, by logits, which p or q is
    def exact(x):
        log_p, log_q = (table(x if y is logits else y, whole=True) for y in (p, q))
        return (log_p.exp() * (log_p - log_q)).sum()
    return gradient_of(exact, logits)


def expected_kl_gradient(estimator, logits, ref, sampler=None, whole=False, chances=None,
                         mask=None, aggregate="sum"):
    """Average gradient of kl_loss, called with one row for each outcome, as often as the sampler
    (None: the policy itself) draws it, or as chances say; these weights are constants."""
    old = table(logits if sampler is None else sampler, whole)
    chances = old.sum(1).exp() if chances is None else chances
    masks = torch.ones_like(old).bool() if mask is None else mask

    def average(x):
        rows = zip(*(rows.split(1) for rows in (table(x, whole), table(ref, whole), masks, old)))
        losses = [grpo.kl_loss(logps, ref_row, mask, estimator, aggregate, old_row)
                  for logps, ref_row, mask, old_row in rows]
        return chances @ torch.stack(losses)
    return gradient_of(average, logits)


def close(a, b):
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def off(ours, exact):
    return ((ours - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("pi, ref, mu", [(PI, REF, MU), (PI2, REF2, MU2)])
def test_k1s_expected_gradient_is_the_same_for_two_references_and_zero_on_policy(pi, ref, mu):
    # The sum over outcomes of p grad log p is the gradient of the sum of p, which is 1.
    assert expected_kl_gradient("k1", pi, ref).abs().max() < 1e-15
    one, other = (expected_kl_gradient("k1", pi, r, mu) for r in (ref, mu))
    assert torch.equal(one, other) and one.norm() > 0.1  # off-policy: not zero, and still the same
    assert not close(*(expected_kl_gradient("k3", pi, r, mu) for r in (ref, mu)))


def test_k1_is_zero_on_policy_under_sum_and_under_mean_makes_completions_longer():
    mask = torch.ones(9, 2, dtype=torch.bool)
    mask[:3, 1] = False  # token 0 is the EOS: no second token after it
    assert expected_kl_gradient("k1", PI2, REF2, mask=mask).abs().max() < 1e-15
    gradient = expected_kl_gradient("k1", PI2, REF2, mask=mask, aggregate="mean")[0]
    p, per_length = PI2[0].softmax(0), f64(1, 0.5, 0.5)
    assert close(gradient, p * per_length - (p @ per_length) * p)
    assert gradient[0] > 0.1 and (gradient[1:] < 0).all()  # descent makes the EOS rarer


def test_k1_under_top_p_moves_mass_out_of_the_nucleus_and_raises_the_entropy():
    p = PI.softmax(0)  # 0.64, 0.24, 0.09, 0.03: the nucleus of top-p 0.9 is the first three
    assert p[:2].sum() < 0.9 < p[:3].sum()
    q = p * f64(1, 1, 1, 0) / p[:3].sum()  # this samples; all of p scores
    gradient = expected_kl_gradient("k1", PI, REF, chances=q)
    assert close(gradient, q - p) and gradient.norm() > 0.02
    after = (PI - gradient).softmax(0)
    assert after[:3].sum() < p[:3].sum() - 1e-3
    assert torch.special.entr(after).sum() > torch.special.entr(p).sum() + 1e-3
    assert close(expected_kl_gradient("k1", PI, PI, chances=q), gradient)  # even at the reference
    assert not expected_kl_gradient("k3", PI, PI, chances=q).any()  # where k3 rests


@pytest.mark.parametrize("estimator, p, q", [("k2", PI, REF), ("k3", REF, PI),
                                             ("weighted", PI, REF)])
def test_one_token_k2_and_weighted_follow_kl_policy_reference_and_k3_the_other(estimator, p, q):
    ours = expected_kl_gradient(estimator, PI, REF)
    assert close(ours, gradient_of_kl(PI, p, q))
    assert off(ours, gradient_of_kl(PI, q, p)) > 0.2
    # From another policy's samples only the weighted form still does.
    miss = off(expected_kl_gradient(estimator, PI, REF, MU), gradient_of_kl(PI, p, q))
    assert miss < 1e-12 if estimator == "weighted" else miss > 0.2


@pytest.mark.parametrize("estimator, p, q, sampler, miss", [
    ("k2", PI2, REF2, None, 0.1419), ("k3", REF2, PI2, None, 0.1933),
    ("weighted", PI2, REF2, None, 0.1419), ("weighted", PI2, REF2, MU2, 0.3313)])
def test_two_tokens_per_token_sums_miss_the_sequences_kl_and_its_own_form_does_not(
        estimator, p, q, sampler, miss):
    exact = gradient_of_kl(PI2, p, q)
    assert close(expected_kl_gradient(estimator, PI2, REF2, sampler, whole=True), exact)
    sums = expected_kl_gradient(estimator, PI2, REF2, sampler)
    assert off(sums, exact) == pytest.approx(miss, abs=5e-4)  # of these logits; others differ


def test_what_the_per_token_sums_miss_is_the_first_tokens_effect_on_the_second():
    p, q = PI2[1:].log_softmax(1), REF2[1:].log_softmax(1)
    later = (p.exp() * (p - q)).sum(1)  # KL of the second token after each first one
    effect = gradient_of(lambda first: first.softmax(0) @ later, PI2[0])
    missed = gradient_of_kl(PI2, PI2, REF2) - expected_kl_gradient("k2", PI2, REF2)
    assert close(missed[0], effect) and close(missed[1:], torch.zeros(3, 3).double())


@pytest.mark.parametrize("surrogate", ["reinforce", "sequence", "token", "gspo", "cispo"])
def test_with_all_rewards_equal_the_whole_gradient_is_the_kls(surrogate):
    old, ref, mask = table(PI2)[:4], table(REF2)[:4], torch.ones(4, 2, dtype=torch.bool)
    for given, equal in (f64([0.1] * 4), True), (f64([1, 1, 0, 0]), False):
        A = grpo.group_advantages(given)[0]
        ours = gradient_of(
            lambda x, A=A: 0.02 * grpo.kl_loss(x, ref, mask, "k3")
            + grpo.policy_loss(x, old, A, mask, surrogate, 10)[0], table(MU2)[:4])
        k3 = (1 - (ref - table(MU2)[:4]).exp()) / 4  # exp(d) - d - 1, differentiated by hand
        assert close(ours, 0.02 * k3) == equal


def adam_step(coefficient, earlier_steps, eps=0.0):
    """How far AdamW, lr 1, moves PI by its next step, on the KL term alone."""
    theta = PI.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theta], lr=1, eps=eps, weight_decay=0)
    for step in range(earlier_steps):  # gradients of +-1, as if from the policy's phase
        theta.grad = torch.full_like(PI, (-1.0) ** step)
        optimizer.step()
    theta.data, theta.grad = PI.clone(), coefficient * expected_kl_gradient("k3", PI, REF)
    optimizer.step()
    return theta.detach() - PI


def test_adams_first_step_does_not_depend_on_the_kl_coefficient():
    large, small = adam_step(0.02, 0), adam_step(0.001, 0)
    assert close(large, -gradient_of_kl(PI, REF, PI).sign())  # g / sqrt(g^2), whatever the scale
    assert close(small, large)
    assert not close(adam_step(0.001, 0, eps=1e-5), adam_step(0.02, 0, eps=1e-5))


def test_with_the_second_moment_kept_adams_step_grows_as_the_kl_coefficient_20_fold():
    momentum = adam_step(0.0, 50)  # what would have happened anyway
    large, small = adam_step(0.02, 50) - momentum, adam_step(0.001, 50) - momentum
    assert (large / small).tolist() == pytest.approx([20] * 4, rel=1e-4)


def test_on_the_first_pass_the_loss_is_0_the_ratio_1_and_the_gradient_reinforces():
    chances, one = table(PI2, whole=True)[:, 0].exp(), torch.ones(1, 2, dtype=torch.bool)
    rewards = f64(1, 0, 0, 3, 1, 0, 0, 0, 3)
    A = rewards - chances @ rewards  # as in an endless group
    # Williams 1992: on average REINFORCE's gradient is that of the expected reward.
    exact = gradient_of(lambda x: -(table(x, whole=True)[:, 0].exp() @ rewards), PI2)

    def loss(logits, surrogate):
        losses, stats = zip(*(grpo.policy_loss(logps, logps, a, one, surrogate, 0.2)
                              for logps, a in zip(table(logits).split(1), A.split(1))))
        assert all(s["ratios"].tolist() == [1] for s in stats)
        return chances @ torch.stack(losses)
    assert loss(PI2, "sequence").item() == pytest.approx(0, abs=1e-15)
    assert abs(loss(PI2, "reinforce").item()) > 0.01  # another loss, the same gradient
    assert close(gradient_of(lambda x: loss(x, "sequence"), PI2), exact)
    assert close(gradient_of(lambda x: loss(x, "reinforce"), PI2), exact)


@pytest.mark.parametrize("scale", ["std", "none"])
def test_format_at_weight_1_pays_a_wrong_formatted_answer_like_a_right_unformatted_one(scale):
    right, formatted = f64([1, 1, 0, 0]), f64([1, 0, 1, 0])
    A = grpo.group_advantages(right + formatted, scale)[0].tolist()
    assert A[1] == A[2] == 0 and A[0] == -A[3] > 0.5
    A = grpo.group_advantages(right + 0.1 * formatted, scale)[0].tolist()
    assert A[0] > A[1] > 0 > A[2] > A[3]  # at weight 0.1 the answer decides


@pytest.mark.parametrize("scale", ["std", "none"])
def test_format_adds_nothing_to_the_advantages_once_every_completion_has_it(scale):
    right, formatted = f64([1, 0, 0, 0, 1, 0, 0, 0]), f64([1] * 8)
    expected = grpo.group_advantages(right, scale)
    assert close(grpo.group_advantages(right + formatted, scale), expected)
    formatted[0, 3] = 0
    assert not close(grpo.group_advantages(right + formatted, scale), expected)


def clip_gradients(ratios, A, *clip):
    """Of the sequence loss of one token, by its log-probability, for each ratio."""
    one, A = torch.ones(1, 1, dtype=torch.bool), f64(A)
    return torch.cat([gradient_of(
        lambda x: grpo.policy_loss(x, f64([0]), A, one, "sequence", *clip)[0], log_ratio)
        for log_ratio in ratios.log()[:, None, None]])[:, 0]


@pytest.mark.parametrize("A", [1.0, -1.0])
def test_the_clip_stops_what_went_far_enough_and_never_what_went_the_wrong_way(A):
    ratios = f64(0.01, 0.5, 0.79, 0.81, 1, 1.27, 1.29, 3, 100)  # bounds 0.8 and 1.28
    stopped = ratios > 1.28 if A > 0 else ratios < 0.8
    assert close(clip_gradients(ratios, A, 0.2, 0.28), torch.where(stopped, 0, -A * ratios))


def test_a_bad_completion_that_grew_likelier_is_pushed_back_in_full_and_by_the_book_not_at_all():
    ratios = f64(1.1, 1.3, 3, 100)
    book = gradient_of(lambda x: -(-1 * x.exp().clamp(max=1.2)).sum(), ratios.log())
    assert close(book, f64(1.1, 0, 0, 0))  # its loss is -A min(r, 1 + eps)
    assert close(clip_gradients(ratios, -1, 0.2), ratios)


@pytest.mark.parametrize("eps", [1, 10])
def test_with_eps_of_1_or_more_the_lower_bound_never_acts(eps):
    ratios = torch.logspace(-8, 8, 33, dtype=torch.float64)  # a ratio is above 0, so above 1 - eps
    assert close(clip_gradients(ratios, -1, eps), ratios)
    assert close(clip_gradients(ratios, -1, 0.95), torch.where(ratios < 0.05, 0, ratios))


def test_with_all_advantages_zero_adams_momentum_still_moves_the_weights():
    theta, mask = PI.clone().requires_grad_(), torch.ones(4, 1, dtype=torch.bool)
    optimizer, path = torch.optim.AdamW([theta], lr=1e-3, weight_decay=0), [PI]
    for given in f64([1, 1, 0, 0]), f64([1, 1, 1, 1]):  # so grpo makes no step of the second
        optimizer.zero_grad()
        A, logps = grpo.group_advantages(given)[0], table(theta)
        grpo.policy_loss(logps, logps, A, mask)[0].backward()
        optimizer.step()
        path.append(theta.detach().clone())
    assert not theta.grad.any()
    # Moments of g, then 0, each over 1 - beta^2: (0.09 / 0.19) / sqrt(0.000999 / 0.001999), 67%.
    part = (path[2] - path[1]) / (path[1] - path[0])
    assert part.tolist() == pytest.approx([0.67006] * 4, rel=1e-4)


# ==== 3. Sampling and the completion mask =========================================================
# The sampler draws from the distribution that is scored, and a rollout says which ids it drew.


@pytest.mark.parametrize("eos_ids, ids, expected", [
    ([256, 257], [[1, 2, 257, 256, 256], [1, 256, 256, 256, 256], [1, 2, 3, 4, 5]],
     [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]),
    ({9, 257, 256}, [[1, 257, 9], [9, 1, 256]], [[1, 1, 0], [1, 0, 0]]),
    (2, [[5, 6, 2, 2, 2]], [[1, 1, 1, 0, 0]]),  # padded with the EOS: the real one is trained
    (0, [[7, 0, 7], [0, 0, 0]], [[1, 1, 0], [1, 0, 0]]),
    ([], [[5, 0, 6]], [[1, 1, 1]])])
def test_the_mask_ends_with_the_first_of_all_eos_ids(eos_ids, ids, expected):
    mask = grpo.completion_mask(torch.tensor(ids), eos_ids)
    assert mask.dtype == torch.bool
    assert mask.long().tolist() == expected


HOSTILE = dict(
    do_sample=True, temperature=0.2, top_k=2, top_p=0.1, min_p=0.3, typical_p=0.4,
    epsilon_cutoff=0.01, eta_cutoff=0.01, repetition_penalty=5.0, no_repeat_ngram_size=2,
    min_new_tokens=6, min_length=12, max_length=9, suppress_tokens=[1, 2, 3, 65, 66],
    begin_suppress_tokens=[4, 5, 6, 67], forced_bos_token_id=9, forced_eos_token_id=7,
    bad_words_ids=[[10], [11, 12]], exponential_decay_length_penalty=(2, 1.5),
    sequence_bias=[[[20], 10.0]], remove_invalid_values=True, renormalize_logits=True,
    num_return_sequences=2, guidance_scale=2.0, stop_strings=["a"], max_time=1e-9)


@pytest.mark.parametrize("settings", [(), (0.7,), (0.7, 0.6)], ids=str)  # temperature, top_p
@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])  # from the second no mask can be guessed
@pytest.mark.parametrize("build", [qwen, gpt2])
def test_the_sampler_draws_from_the_distribution_that_is_scored(build, pad, settings, monkeypatch):
    """Whatever the model's generation config, and without dropout: ratio 1 and KL 0 at step 0."""
    dropout = {"dropout": 0.5} if build is gpt2 else {}
    model, tokenizer = build(vocab_size=258, **dropout), byte_tokenizer()
    temperature, top_p = (*settings, 1.0, 1.0)[:2]
    tokenizer.pad_token = pad
    hostile = model.generation_config = transformers.GenerationConfig(
        **HOSTILE, eos_token_id=[3, 4, 5, 6])
    settings_before = hostile.to_dict()
    seen = spy(monkeypatch, model.train())
    rollout = grpo.sample(model, tokenizer, ["a", "a longer prompt"], 4, 8, *settings)
    assert model.training and not seen[0].training
    assert model.generation_config is hostile and hostile.to_dict() == settings_before
    assert len({tuple(row) for row in rollout.input_ids.tolist()}) > 4  # drawn independently

    p = (seen[0].logits / temperature).softmax(2)  # (B, T, V)
    # What top_p keeps: the fewest tokens that hold so much of the probability, the likeliest ones.
    likelier = [torch.where(row > row[:, None], row, 0).sum(1) for row in p.flatten(0, 1)]
    kept = torch.stack(likelier).view_as(p) < top_p
    assert seen[0].scores.isfinite().equal(kept)  # nothing else was cut off
    scores, logits = seen[0].scores[kept], seen[0].logits[kept]
    assert torch.allclose(scores, logits / temperature, rtol=1e-5)
    T, on = rollout.mask.shape[1], rollout.mask
    expected = p.gather(2, rollout.input_ids[:, -T:, None])[on].log()[:, 0]
    logps, _ = grpo.token_logps(
        model, rollout.input_ids, rollout.attention_mask, T, temperature)
    assert logps[on].tolist() == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("own, pad, as_ids", [
    (None, "<pad>", False), (3, "<eos>", True), ([3, 4], None, True)])
def test_a_rollout_is_prompt_major_and_ends_at_the_first_eos(monkeypatch, own, pad, as_ids):
    """The EOS ids are those of the generation config (own) and the tokenizer's."""
    tokenizer, model = byte_tokenizer(), qwen(vocab_size=258)
    tokenizer.pad_token, model.generation_config.eos_token_id = pad, own
    prompts = ["a", "a longer prompt"]
    completions = [[9, EOS, PAD, PAD], [9, 9, 3, 5], [9, 4, 9, 9], [9, 9, 9, 9], [9, 9, 9, EOS],
                   [EOS, 9, 9, 9]]
    lengths = [2, 3 if own else 4, 2 if own == [3, 4] else 4, 4, 4, 1]
    truncated = [False, own is None, own != [3, 4], True, False, False]
    seen = script(monkeypatch, model, completions)
    ids = tokenizer(prompts)["input_ids"]
    rollout = grpo.sample(model, tokenizer, ids if as_ids else prompts, 3, 4)
    for i, n in enumerate(lengths):
        prompt, text = ids[i // 3], completions[i][:n if truncated[i] else n - 1]
        attended = [0] * (15 - len(prompt)) + [1] * (len(prompt) + n) + [0] * (4 - n)
        assert rollout.input_ids[i, 15 - len(prompt):].tolist() == prompt + completions[i]
        assert rollout.attention_mask[i].tolist() == attended
        assert rollout.mask[i].tolist() == [x == 1 for x in attended[15:]]
        assert rollout.texts[i] == tokenizer.decode(text)
    assert rollout.mask.dtype == rollout.truncated.dtype == torch.bool
    assert rollout.truncated.tolist() == truncated
    told = seen[0].config.eos_token_id
    assert {EOS, *np.atleast_1d(own or [])} == set(np.atleast_1d(told))


def test_text_ends_before_the_first_eos_and_the_ids_stay_those_sampled(monkeypatch):
    tokenizer, model = byte_tokenizer(), qwen(vocab_size=300)
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)  # 258, 259
    a, b, c = tokenizer("abc")["input_ids"]
    tokenizer.add_tokens(["abc"])  # what decodes to it would be encoded as one id, 260
    completions = [[258, a, 259, EOS, b], [EOS, 258, a, PAD, PAD], [a, 299, b, c, c],
                   [299, 298, 297, 296, 295], [a, b, c, EOS, PAD]]  # there is no token above 260
    script(monkeypatch, model, completions)
    rollout = grpo.sample(model, tokenizer, ["x"], 5, 5)
    assert rollout.texts == ["<think>a</think>", "", "abcc", "", "abc"]
    assert rollout.input_ids[:, -5:].tolist() == completions
    assert rollout.mask.sum(1).tolist() == [4, 1, 5, 5, 4]


@pytest.mark.parametrize("pad, size", [("<eos>", 258), ("<pad>", 257)])
def test_padding_is_told_by_its_place_and_its_id_is_in_the_embedding(pad, size, monkeypatch):
    tokenizer, model = byte_tokenizer(), qwen(vocab_size=size)  # 257 rows: PAD is not among them
    tokenizer.pad_token = pad
    seen = script(monkeypatch, model, [[9, 9]] * 2)
    rollout = grpo.sample(model, tokenizer, [[EOS, 0, EOS], [6]], 1, 2)
    assert rollout.input_ids[0, :3].tolist() == [EOS, 0, EOS]
    assert rollout.attention_mask.tolist() == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert 0 <= rollout.input_ids.min() and rollout.input_ids.max() < size
    assert 0 <= seen[0].config.pad_token_id < size


def test_without_any_eos_every_completion_runs_to_the_limit():
    tokenizer, model = byte_tokenizer(), qwen(vocab_size=258)
    tokenizer.eos_token = tokenizer.pad_token = None
    rollout = grpo.sample(model, tokenizer, ["x", "longer"], 2, 5)
    assert rollout.mask.shape == (4, 5) and rollout.mask.all() and rollout.truncated.all()


def test_an_exception_while_sampling_leaves_config_and_training_flag_as_they_were(monkeypatch):
    model = gpt2(vocab_size=258).train()
    config = model.generation_config
    monkeypatch.setattr(model, "generate", None)
    with pytest.raises(TypeError, match="not callable"):
        grpo.sample(model, byte_tokenizer(), ["x"], 2, 4)
    assert model.generation_config is config and model.training


# ==== 4. Advantages ===============================================================================
# GRPO's and GDPO's, against numpy; and rounding errors, which are no advantage.


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.float64])
@pytest.mark.parametrize("scale, eps", [("std", 1e-4), ("std", 0.3), ("none", 1e-4)])
def test_advantages_are_taken_from_the_group_alone(scale, eps, dtype):
    """Not from the batch: a group of ones beside one of zeros has none."""
    r = torch.tensor([[0, 4, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 2, 0, 7]])
    ours, r = grpo.group_advantages(r.to(dtype), scale, eps), r.to(dtype).double().numpy()
    centred = r - r.mean(1, keepdims=True)
    spread = {"std": r.std(1, ddof=1, keepdims=True) + eps, "none": 1}[scale]
    assert ours.dtype.is_floating_point
    assert ours.numpy() == pytest.approx(centred / spread, rel=1e-6, abs=1e-12)
    assert (ours[2:4] == 0).all()


ULP = 2**-23  # of float32, relative
PARTS = np.float32([0.1, 0.2, 0.3, 0.15, 0.05, 0.7])  # added in three orders:
SUMS = [float(PARTS[[*map(int, order)]].cumsum()[-1]) for order in ("012345", "543210", "305142")]


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("flat, values, size", [
    *((True, [value] * G, None) for value in (0.1, 1 / 3, 0.0, -1e4) for G in (2, 8, 15)),
    (True, [0.1, 0.1 + 1e-7], None),
    (True, [1, 1 + 1e-9], None),
    (True, [0.1 + 0.2, 0.3, 0.3 + 0.0], None),
    (True, SUMS, None),
    (True, [1 - 16 * ULP, 1, 1], None),
    (True, [16 * ULP - 1, -1, 16 * ULP - 1], None),
    (True, [0, 1e-6], [0.1, 1.0]),  # what was added, and cancelled, was of size 1
    (False, [0, 1e-6], [0.1, 0.1]),
    (False, [1 - 16.5 * ULP, 1, 1], None),
    (False, [1, 1 - 12 * ULP, 1 + 12 * ULP], None),  # either is within 16 of the first
    (False, [1, 1.001], None),
    (False, [0, 1e-12], None)])
def test_rewards_that_differ_by_16_ulps_of_float32_are_equal(flat, values, size, scale):
    """Of the group's largest magnitude, or of the size of what was added into the rewards."""
    for dtype, eps in (torch.float32, 1e-4), (torch.float64, 1e-4), (torch.float32, 0.0):
        other = np.arange(len(values)) * 1e6  # a group of another magnitude
        table = torch.tensor(np.array([values, other]), dtype=dtype)
        sizes = None if size is None else torch.tensor(np.array([size, other]), dtype=dtype)
        ours = grpo.group_advantages(table, scale, eps, sizes)
        assert (ours[0] == 0).all() if flat else (ours[0] != 0).any()
        assert (ours[1] != 0).any()


def by_gdpo(rewards, weights, eps=1e-4):
    """Advantages (P, G) of rewards (P, G, K) in float64: each reward normalised in its group, a row
    that lacks it (NaN) standing at the mean, then the weighted sum over all completions."""
    A = np.zeros(np.shape(rewards))
    for p, k in np.ndindex(A.shape[0], A.shape[2]):
        r = np.asarray(rewards, dtype=np.float64)[p, :, k]
        has = ~np.isnan(r)
        if has.sum() > 1:
            filled = np.where(has, r, r[has].mean())
            A[p, :, k] = (filled - filled.mean()) / (filled.std(ddof=1) + eps)
    total = A @ np.asarray(weights, dtype=np.float64)
    return (total - total.mean()) / (total.std(ddof=1) + eps)


@pytest.mark.parametrize("missing", [0.0, 0.4])
@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 2, 4), (5, 4, 3), (3, 16, 2)], ids=str)
def test_gdpo_normalises_each_reward_in_its_group_and_then_their_sum_over_all(shape, missing):
    rng = np.random.default_rng(sum(shape))
    r = rng.normal(3, 1, shape) * 100.0 ** np.arange(shape[2])  # no scale drowns another
    r[rng.random(shape) < missing] = math.nan
    weights = rng.uniform(0.2, 2, shape[2]) * (-1) ** np.arange(shape[2])
    for given, eps in (weights.tolist(), 1e-4), (torch.tensor(weights), 0.3):
        ours = grpo.gdpo_advantages(torch.tensor(r), given, eps)
        assert ours.shape == shape[:2]
        assert ours.numpy() == pytest.approx(by_gdpo(r, weights, eps), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_gdpo_agrees_with_trl(dtype):
    # TRL 1.16.0's lines for multi_objective_aggregation="normalize_then_sum", weights 1 and 0.5.
    r = torch.tensor([[[1, 10], [0, 40], [0, 0], [1, 5]], [[3, 0], [0, 0], [1, 0], [0, 2]]])
    printed = [0.9119815, -0.1622579, -1.4950999, 0.7453763,
               1.3941226, -1.1461003, -0.2993594, 0.0513372]
    ours = grpo.gdpo_advantages(r.to(dtype), [1, 0.5])
    assert ours.flatten().tolist() == pytest.approx(printed, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_under_gdpo_flat_groups_and_rewards_that_cancel_are_exactly_zero(dtype):
    r = torch.rand(6, 8, 2, generator=torch.Generator().manual_seed(0), dtype=dtype)
    r[1], r[2] = 0.1, torch.tensor([0.7, -1e4])  # a float32 std of eight times 0.1 is not 0
    r[3, :, 1] = 0.7 - r[3, :, 0]  # cancels, but for rounding, under equal weights
    r[4, 1:, 0] = r[4, :, 1] = math.nan  # applies to one row, to none
    ours = grpo.gdpo_advantages(r, [1.0, 1.0])
    assert (ours == 0).all(1).tolist() == [False, True, True, True, True, False]
    assert (grpo.gdpo_advantages(r[1:5], [0.3, 0.3]) == 0).all()
    assert (grpo.gdpo_advantages(r[3:4], [1.0, 0.9]) != 0).all()  # these do not cancel


# ==== 5. Log-probabilities ========================================================================
# Of exactly the sampled tokens, whatever the padding; gradients through them are those of SFT.


@torch.no_grad()
def alone(model, prompt, completion, temperature=1.0):
    """(logps, entropies) of one completion, without padding, mask, position ids or dropout."""
    model = copy.deepcopy(model).eval()
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].double()
    table = (logits / temperature).log_softmax(1)[len(prompt) - 1:-1]  # position p predicts p + 1
    return table[range(len(completion)), completion].numpy(), -(table.exp() * table).sum(1).numpy()


PROMPTS = [[5, 6, 7], [11, 12, 13, 14, 15, 16, 17, 18], [30]]
COMPLETIONS = [[20, 21, 22, 23, 24], [40, 41], [50, 51, 52, 53]]


def batch(left=0, right=0):
    """PROMPTS padded on the left, COMPLETIONS on the right, by that many columns more."""
    L, T = 8 + left, 5 + right
    ids, attention_mask = torch.zeros(2, 3, L + T, dtype=torch.long)
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS)):
        span = slice(L - len(prompt), L + len(completion))
        ids[i, span], attention_mask[i, span] = torch.tensor(prompt + completion), 1
    return grpo.Rollout(ids, attention_mask, attention_mask[:, L:].bool(), [], None), T


@pytest.mark.parametrize("temperature, left, right, training", [(1.0, 0, 0, True),
                                                                (0.6, 5, 2, False)])
@pytest.mark.parametrize("build", [qwen, lambda: gpt2(dropout=0.5)], ids=["qwen", "gpt2"])
def test_each_row_of_a_padded_batch_is_scored_as_if_alone(
        build, temperature, left, right, training, monkeypatch):
    """Whatever its padding, and without dropout. rollout_logps drops the columns that are padding
    in all rows, where the mask has holes, too: a sampler that runs tools attends to their output
    but does not train it."""
    model, (rollout, T) = build().train(training), batch(left, right)
    expected = [alone(model, *pair, temperature) for pair in zip(PROMPTS, COMPLETIONS)]
    for row, pair in zip(expected, zip(PROMPTS, COMPLETIONS)):  # this model would notice
        assert np.abs(row[0] - alone(model, *pair, temperature / 2)[0]).max() > 0.3
        assert np.abs(row[0] - alone(model, [0, *pair[0]], pair[1], temperature)[0]).max() > 0.01
    rollout.mask[0, 1:4] = False  # a hole: 20, -, -, -, 24
    rollout.mask[2, 2:] = False  # attended after the last trained column, which ends the width
    token_logps, scored = grpo.token_logps, []

    def seen(model, ids, attention_mask, width, *rest):
        scored.append((ids.shape[1] - width, width))
        return token_logps(model, ids, attention_mask, width, *rest)

    monkeypatch.setattr(grpo, "token_logps", seen)
    for rows, size in ([0, 1, 2], (8, 5)), ([2, 0], (3, 5)), ([1], (8, 2)), ([2], (1, 2)):
        ours = grpo.rollout_logps(model, rollout, torch.tensor(rows), temperature)
        assert scored.pop() == size  # the longest prompt, the last trained column + 1
        whole = token_logps(
            model, rollout.input_ids[rows], rollout.attention_mask[rows], T, temperature)
        for table, k in (ours[0], 0), (ours[1], 1), (whole[0], 0), (whole[1], 1):
            assert table.shape == (len(rows), T)
            for i, values in zip(rows, table.tolist()):
                on = np.flatnonzero(rollout.mask[i])
                assert np.array(values)[on] == pytest.approx(expected[i][k][on], abs=1e-4)
    assert model.training == training


def test_log_probabilities_are_float32_whatever_the_models_type_and_logits(monkeypatch):
    model, ids = qwen().to(torch.bfloat16), torch.tensor([[5, 6, 7, 20, 21, 22, 23]])
    forward = model.forward  # of some models it returns all logits, not those that one keeps
    monkeypatch.setattr(model, "forward", lambda logits_to_keep=0, **rest: forward(**rest))
    logps, entropy = grpo.token_logps(model, ids, torch.ones_like(ids), 4)
    assert logps.dtype == entropy.dtype == torch.float32
    expected, expected_entropy = alone(model, [5, 6, 7], [20, 21, 22, 23])
    assert logps[0].tolist() == pytest.approx(expected, abs=1e-3)  # bf16 log-softmax: 1e-2 off
    assert entropy[0].tolist() == pytest.approx(expected_entropy, abs=1e-3)


def test_entropy_is_finite_where_probabilities_are_exactly_zero():
    model, ids = Fixed([0.0, -1e4, 0.0, -math.inf]), torch.tensor([[0, 2, 0]])
    logps, entropy = grpo.token_logps(model, ids, torch.ones_like(ids), 2)
    assert logps[0].tolist() == pytest.approx([-math.log(2)] * 2)
    assert entropy[0].tolist() == pytest.approx([math.log(2)] * 2)


@pytest.mark.parametrize("build", [qwen, gpt2])
def test_with_advantages_of_1_grpo_is_sft(build):
    """In its loss and in the gradient of every parameter, as Transformers computes them."""
    model, (rollout, T) = build(), batch(left=2, right=3)
    logps, entropy = grpo.rollout_logps(model, rollout, torch.arange(3), 1.0)
    assert not entropy.requires_grad
    loss, _ = grpo.policy_loss(logps, logps, torch.ones(3), rollout.mask, aggregate="token")
    labels = rollout.input_ids.masked_fill(rollout.attention_mask == 0, -100)
    labels[:, :-T] = -100  # the prompt
    sft = model(input_ids=rollout.input_ids, attention_mask=rollout.attention_mask, labels=labels,
                position_ids=(rollout.attention_mask.cumsum(1) - 1).clamp(min=0)).loss
    assert loss.item() == pytest.approx(sft.item(), rel=1e-5)
    ours, theirs = parameter_gradients(model, loss), parameter_gradients(model, sft)
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()
    assert all(p.grad.abs().max() > 0 for p in model.parameters())


# ==== 6. The policy loss ==========================================================================
# Its value, gradient and statistics by definition, by TRL's numbers and by PPO's table.


def off_policy():
    """logps, old, ref, advantages, weights (float64) and a mask with a hole in row 0 and nothing in
    row 6. As many rows as columns: advantages without an unsqueeze would go along time. With eps
    0.2, 0.28 rows 0 and 3 hold clipped terms for every surrogate, on either side."""
    rng = np.random.default_rng(0)
    logps = rng.normal(-2, 0.5, (7, 7))
    drift = np.array([0.6, -0.6, 0.6, -0.6, 0.05, -0.05, 0.3])[:, None]
    old = logps - drift - rng.normal(0, 0.1, (7, 7))
    ref = logps + rng.normal(0, 0.5, (7, 7))
    A = np.array([1.3, 0.4, -0.9, -1.6, 0.8, -0.2, -0.5])
    mask = np.arange(7) < np.array([6, 4, 1, 5, 3, 2, 0])[:, None]
    mask[0, 2] = False
    return logps, old, ref, A, mask, rng.uniform(0.2, 2, (7, 7))


def whole_and_in_parts(function, denominator, mask, *tables):
    """(loss, gradient) of function(rows, mask, *tables, normalizer): of all rows at once, then the
    sum over micro-batches of several sizes and widths. What is masked is NaN or infinite."""
    junk = np.resize([math.nan, math.inf, -math.inf], mask.shape)
    for sizes, normalizer in ([7], None), ([1, 3, 2, 1], denominator):
        losses, gradients = [], []
        for extra, rows in enumerate(np.split(np.arange(7), np.cumsum(sizes)[:-1])):
            parts = [mask, *(np.where(mask, table, junk) for table in tables)]
            parts = [np.pad(part[rows], [(0, 0), (0, extra)]) for part in parts]
            loss, gradient = function(rows, *map(torch.tensor, parts), normalizer)
            losses.append(loss)
            gradients.append(gradient[:, :7])
        yield sum(losses), np.concatenate(gradients)


def shares(mask, aggregate):
    """What a token's term is multiplied by in the aggregated loss."""
    B, lengths = len(mask), mask.sum(1, keepdims=True)
    return mask * {"sum": 1 / B, "mean": 1 / np.maximum(lengths, 1) / B, "token": 1 / mask.sum(),
                   "constant": 1 / (B * MAX_LEN)}[aggregate]


def by_definition(logps, old, A, mask, surrogate, clip, aggregate, weights, D):
    """(loss, its gradient, [(ratio, clipped), ...]): term by term, each of a token or a row."""
    lo, hi = clip[0], clip[0] if clip[1] is None else clip[1]
    low, high = -math.inf if lo is None else 1 - lo, math.inf if hi is None else 1 + hi
    loss, gradient, seen, share = 0.0, np.zeros_like(logps), [], shares(mask, aggregate)
    for i in np.flatnonzero(mask.any(1)):
        row = np.flatnonzero(mask[i])
        dropped = A[i] < 0 and (old - logps)[i, row].mean() > D  # DeepSeek-V3.2's mask
        for term in [row] if surrogate in PER_COMPLETION else row[:, None]:
            log_ratios = (logps - old)[i, row if surrogate == "reinforce" else term]
            r = np.exp(log_ratios.mean() if surrogate == "gspo" else log_ratios.sum())
            clipped = (A[i] > 0 and r > high) or (A[i] < 0 and r < low)
            if surrogate in ("reinforce", "cispo"):  # a constant times the log-probability
                clipped = surrogate == "cispo" and r > high
                slope = -A[i] * (1 if surrogate == "reinforce" else min(r, high))
                value = slope * logps[i, term].item()
            else:
                value = -A[i] * (np.clip(r, low, high) if clipped else r)
                slope = 0 if clipped else -A[i] * r / (len(row) if surrogate == "gspo" else 1)
            factor = 1 / len(mask) if surrogate in PER_COMPLETION else share[i, term].item()
            factor *= 0 if dropped else weights[i, term].mean()
            loss += factor * value
            gradient[i, term] += factor * slope
            seen.append((r, clipped))
        if surrogate == "reinforce":  # has no ratio; its statistics are of the row's, counted once
            seen = seen[:len(seen) + 1 - len(row)]
    return loss, gradient, seen


SURROGATE_AND_CLIP = [  # nothing clipped, one eps, two, the upper alone; cispo needs a cap
    (surrogate, clip) for surrogate in SURROGATES
    for clip in ((None, None), (0.2, None), (0.2, 0.28), (None, 0.28))
    if surrogate != "cispo" or clip != (None, None)]


@pytest.mark.parametrize("D", [None, 0.3], ids=["plain", "weights, off-policy mask"])
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("surrogate, clip", SURROGATE_AND_CLIP)
def test_policy_loss_gradient_and_statistics_are_those_of_the_definition(
        surrogate, clip, aggregate, D):
    """D drops row 3 from the loss, but from no denominator and from no statistics."""
    logps, old, _, A, mask, weights = off_policy()
    settings = (surrogate, clip, aggregate, np.ones_like(weights), math.inf)
    if D is not None:
        settings = (surrogate, clip, aggregate, weights, D)
    expected, slope, seen = by_definition(logps, old, A, mask, *settings)
    ratios, clipped = map(np.array, zip(*seen))
    statistics = dict(
        ratio_mean=ratios.mean(), ratio_max=ratios.max(), clip_frac=clipped.mean())
    if clip[0] and surrogate in ("sequence", "token", "gspo"):  # both bounds were at work
        assert 0 < clipped[ratios > 1].mean() < 1 and 0 < clipped[ratios < 1].mean() < 1

    def ours(rows, mask, logps, old, weights, normalizer):
        loss, gradient, stats = policy(
            logps, old, torch.tensor(A[rows]), mask, surrogate, *clip, aggregate, MAX_LEN,
            None if D is None else weights, normalizer, off_policy_mask=D)
        if len(rows) == len(A):
            assert stats == pytest.approx(statistics, rel=1e-6)
        return loss, gradient

    denominator = grpo.denominator(torch.tensor(mask), surrogate, aggregate, MAX_LEN)
    for loss, gradient in whole_and_in_parts(ours, denominator, mask, logps, old, weights):
        assert loss == pytest.approx(expected, rel=1e-9)
        assert gradient == pytest.approx(slope, rel=1e-9, abs=1e-15)
        assert (gradient[~mask] == 0).all() and (D is None or (gradient[3] == 0).all())


# TRL 1.16.0's GRPOTrainer on the tensors below: one micro-batch, epsilon 0.2, epsilon_high 0.28
# (cispo's 1.1 is the cap itself: ours is 0.1), max_completion_length 16.
TRL_LOGPS = [
    [-2.56291986, -2.57617998, -2.1252892, -2.21693945, -1.57564485, -1.65399539, -2.15800643],
    [-3.05760956, -1.83886254, -2.63166738, -1.82500839, -1.84593308, -1.91677237, -1.56280911],
    [-2.07173681, -2.05580473, -2.30679154, -1.98420358, -2.24633837, -1.87579262, -1.69097161],
    [-2.20640111, -2.42053246, -3.15802097, -2.05115485, -1.603778, -2.1448338, -1.9737463]]
TRL_OLD = [
    [-2.61510825, -2.77980375, -1.84381104, -2.07027841, -1.7775718, -1.39214599, -1.84139919],
    [-3.00425649, -1.99428499, -2.72367859, -2.29930663, -1.33394003, -1.46403575, -0.93822247],
    [-1.55972338, -1.34169447, -2.64447212, -2.07930303, -2.5740788, -1.90135086, -1.59268737],
    [-2.43461323, -2.90025711, -3.15247488, -2.27628279, -1.54815567, -1.95849228, -1.78229177]]
TRL_REF = [
    [-2.56424141, -2.78995633, -1.65781403, -2.0591383, -0.79906005, -1.33739614, -2.16610718],
    [-3.23247743, -2.45297742, -2.7967391, -1.43848705, -1.19601989, -1.53176498, -1.42314184],
    [-2.44032168, -2.07828259, -2.58740091, -1.56952882, -2.48780632, -2.38729858, -1.64141059],
    [-1.74048769, -2.05118299, -2.60310292, -1.50113964, -1.33992553, -1.954211, -2.38026929]]
TRL_WEIGHTS = [
    [0.39853424, 0.99868065, 1.76585078, 0.94719976, 1.07779217, 0.96373111, 1.25238132],
    [1.68583941, 1.99724615, 1.68505585, 1.99941349, 0.97767836, 0.15167849, 0.57592279],
    [1.73090518, 1.04351747, 0.55295366, 0.28368825, 0.11414795, 0.20599179, 0.84716326],
    [1.59840596, 1.59064102, 0.08556812, 1.67378199, 0.26749057, 0.83858973, 0.64452738]]
TRL_A, TRL_LENGTHS = [1.3, -0.7, 0.0, -0.9], [7, 5, 1, 6]
# Per case: (surrogate, clip, aggregate, old = logps?, weights?, KL term times 0.1), the loss,
# the gradient of the first three rows.
TRL_CASES = {
    "grpo": (("token", (0.2, 0.28), "mean", False, False, None), 0.147895098, [
        [-0.0489159, -0.0569139, -0.0350381, -0.0400951, -0.0568174, -0.0357327, -0.0338286],
        [0.0331816, 0.0408853, 0.0383732, 0.056241, 0, 0, 0], [0] * 7]),
    "grpo, KL": (("token", (0.2, 0.28), "mean", False, False, "k3"), 0.156906173, [
        [-0.0489112, -0.0562265, -0.0371665, -0.0407056, -0.0610103, -0.0370629, -0.0337998],
        [0.0339837, 0.0431797, 0.039134, 0.0538818, -0.0045769, 0, 0],
        [0.0077072, 0, 0, 0, 0, 0, 0]]),
    "sequence level": (("gspo", (0.2, 0.28), "mean", False, False, None), 0.132303804, [
        [-0.0429273, -0.0429273, -0.0429273, -0.0429273, -0.0429273, -0.0429273, -0.0429273],
        [0.036112, 0.036112, 0.036112, 0.036112, 0.036112, 0, 0], [0] * 7]),
    "dr_grpo": (("token", (0.2, 0.28), "constant", False, False, None), 0.0239592437, [
        [-0.0214007, -0.0248998, -0.0153292, -0.0175416, -0.0248576, -0.015633, -0.0148],
        [0.0103692, 0.0127767, 0.0119916, 0.0175753, 0, 0, 0], [0] * 7]),
    "dapo": (("token", (0.2, 0.28), "token", False, False, None), 0.0807048231, [
        [-0.0720867, -0.0838731, -0.0516351, -0.0590875, -0.0837308, -0.0526587, -0.0498527],
        [0.034928, 0.0430372, 0.0403928, 0.0592011, 0, 0, 0], [0] * 7]),
    "cispo": (("cispo", (None, 0.1), "token", False, False, None), -0.122602299, [
        [-0.0720867, -0.0752632, -0.0516351, -0.0590875, -0.0752632, -0.0526587, -0.0498527],
        [0.034928, 0.0405263, 0.0403928, 0.0405263, 0.0220795, 0, 0], [0] * 7]),
    "grpo, on-policy": (("token", (0.2, 0.28), "mean", True, False, None), 0.0749999881, [
        [-0.0464286, -0.0464286, -0.0464286, -0.0464286, -0.0464286, -0.0464286, -0.0464286],
        [0.035, 0.035, 0.035, 0.035, 0.035, 0, 0], [0] * 7]),
    "grpo, weighted KL": (("token", (0.2, 0.28), "mean", False, False, "weighted"), 0.156833112, [
        [-0.048911, -0.0559779, -0.0362981, -0.0405818, -0.0602115, -0.0366029, -0.0338076],
        [0.0340105, 0.0444722, 0.0392781, 0.0531355, -0.0019475, 0, 0],
        [0.0055222, 0, 0, 0, 0, 0, 0]]),
    "grpo, importance weights": (("token", (0.2, 0.28), "mean", False, True, None), 0.316929042, [
        [-0.0194947, -0.0568388, -0.0618721, -0.0379781, -0.0612373, -0.0344367, -0.0423664],
        [0.0559388, 0.081658, 0.064661, 0.112449, 0, 0, 0], [0] * 7]),
}


@pytest.mark.parametrize("case", TRL_CASES)
def test_loss_and_gradient_agree_with_trl(case):
    surrogate, clip, aggregate, on_policy, weighted, estimator = TRL_CASES[case][0]
    logps, old, ref, weights = map(torch.tensor, (TRL_LOGPS, TRL_OLD, TRL_REF, TRL_WEIGHTS))
    old = logps if on_policy else old
    A, mask = torch.tensor(TRL_A), torch.arange(7) < torch.tensor(TRL_LENGTHS)[:, None]

    loss, gradient, _ = policy(logps, old, A, mask, surrogate, *clip, aggregate, 16,
                               weights if weighted else None)
    if estimator:
        kl_value, kl_gradient = kl(logps, ref, mask, estimator, aggregate, old, 16)
        loss, gradient = loss + 0.1 * kl_value, gradient + 0.1 * kl_gradient
    _, trl_loss, trl_gradient = TRL_CASES[case]
    assert loss == pytest.approx(trl_loss, rel=1e-5)
    assert gradient[:3] == pytest.approx(np.array(trl_gradient), abs=1e-7)


@pytest.mark.parametrize("clip, ratios, A, loss, gradient, clip_frac", [
    ((0.2,), [1.5], [1], -1.2, [0], 1),  # PPO's table
    ((0.2,), [0.5], [1], -0.5, [-0.5], 0),
    ((0.2,), [1.5], [-1], 1.5, [1.5], 0),
    ((0.2,), [0.5], [-1], 0.8, [0], 1),
    ((0.2,), [1.1], [1], -1.1, [-1.1], 0),
    ((None, 0.2), [1e-3, 1.5], [-1, 1], (1e-3 - 1.2) / 2, [1e-3 / 2, 0], 0.5),  # no lower bound
    ((), [1e-3, 100], [-1, 1], (1e-3 - 100) / 2, [1e-3 / 2, -50], 0),  # none at all
    ((0.0,), [1.1], [1], -1, [0], 1),  # a bound of zero is a bound
    ((0.2, 0.0), [1.1], [1], -1, [0], 1),
    ((0.0, 0.2), [1.1], [1], -1.1, [-1.1], 0)])
def test_clipping_by_ppos_table(clip, ratios, A, loss, gradient, clip_frac):
    """Of completions of one token, for which these losses are all the same."""
    log_ratio = torch.tensor(ratios, dtype=torch.float64).log()[:, None]
    A, mask = torch.tensor(A, dtype=torch.float64), torch.ones_like(log_ratio).bool()
    for surrogate, aggregate in itertools.product(("token", "sequence", "gspo"), AGGREGATES):
        ours, slope, stats = policy(
            log_ratio, log_ratio * 0, A, mask, surrogate, *clip, aggregate=aggregate, max_len=1)
        assert ours == pytest.approx(loss)
        assert slope[:, 0] == pytest.approx(np.array(gradient))
        assert stats["clip_frac"] == pytest.approx(clip_frac)


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("log_ratio, ratio", [(1000.0, math.exp(20)), (-1000.0, math.exp(-20))])
def test_log_ratios_are_clamped_to_20(log_ratio, ratio, surrogate):
    """So nothing is infinite; beyond, the gradient through a ratio is 0."""
    logps = f64([log_ratio])
    value, slope = {"reinforce": (log_ratio, 1), "cispo": (ratio * log_ratio, ratio)}.get(
        surrogate, (ratio, 0))
    for A in 1, -1:
        loss, gradient, stats = policy(logps, logps * 0, f64(A), logps != 0, surrogate, None, 1e9)
        assert loss == pytest.approx(-A * value, rel=1e-9)
        assert gradient.item() == pytest.approx(-A * slope, rel=1e-9)
        assert stats["ratio_max"] == pytest.approx(ratio, rel=1e-9)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_the_off_policy_mask_keeps_a_row_at_exactly_D_and_good_rows(surrogate):
    old, mask = torch.zeros(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.bool)
    down = f64([1, 0], [0.5, 0.5])  # drifts of exactly 0.5
    for D, stays in (0.5, True), (math.nextafter(0.5, 0), False), (0.0, False):
        for A, wanted in (f64(-1, -1), stays), (f64(1, 1), True):
            gradient = policy(-down, old, A, mask, surrogate, None, 4.0, off_policy_mask=D)[1]
            assert ((gradient != 0) == wanted).all()


@pytest.mark.parametrize("aggregate, value", [
    ("token", -0.5), ("mean", 0), ("constant", -1 / 3), ("sum", -2)])
def test_aggregations_of_a_group_whose_good_completions_are_long(aggregate, value):
    A, mask = torch.tensor([1.0, -1, 1, -1]), torch.arange(6) < torch.tensor([[6], [2], [6], [2]])
    logps = torch.full((4, 6), -1.5)
    clip = (0.2, None)
    loss, _, _ = policy(logps, logps, A, mask, "token", *clip, aggregate, 6)
    assert loss == pytest.approx(value, abs=1e-6)
    for surrogate in SURROGATES:  # all masked: no 0 / 0
        loss, gradient, _ = policy(logps, logps, A, mask & False, surrogate, *clip, aggregate, 6)
        assert loss == 0 and (gradient == 0).all()


ARGS = (torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2), torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.parametrize("wrong", [
    lambda: grpo.policy_loss(*ARGS, "ppo", 0.2),
    lambda: grpo.policy_loss(*ARGS, "kl", 0.2),  # has a denominator, but is no surrogate
    lambda: grpo.policy_loss(*ARGS, "cispo"),  # without a cap
    lambda: grpo.policy_loss(*ARGS, "token", aggregate="average"),
    lambda: grpo.kl_loss(*ARGS[:2], ARGS[3], "k4"),
    lambda: grpo.kl_loss(*ARGS[:2], ARGS[3], "k3", "average"),
    lambda: grpo.denominator(ARGS[3], "ppo", "sum"),
    lambda: grpo.denominator(ARGS[3], "token", "average"),
    lambda: grpo.group_advantages(torch.zeros(3, 1)),  # nothing to compare with
    lambda: grpo.group_advantages(torch.zeros(3, 0)),
    lambda: grpo.group_advantages(torch.zeros(4)),
    lambda: grpo.group_advantages(torch.tensor([[0.0, 1.0]]), "population"),
    lambda: grpo.gdpo_advantages(torch.zeros(3, 1, 2), [1, 1]),
    lambda: grpo.gdpo_advantages(torch.randn(3, 4, 2), [1.0])])  # a weight for each reward
def test_unknown_names_and_groups_of_one_are_refused(wrong):
    with pytest.raises((KeyError, ValueError)):
        wrong()


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_a_surrogate_that_the_table_of_terms_lacks_or_has_otherwise_is_an_error(
        surrogate, monkeypatch):
    """Never another gradient or denominator."""
    kinds = ("completion", "token") if surrogate in PER_COMPLETION else ("token", "completion")
    assert grpo.TERMS[surrogate] == kinds[0] and grpo.TERMS["kl"] == "token"
    monkeypatch.setitem(grpo.TERMS, surrogate, kinds[1])
    with pytest.raises((LookupError, ValueError)):
        grpo.policy_loss(*ARGS, surrogate, 0.2)
    monkeypatch.delitem(grpo.TERMS, surrogate)
    with pytest.raises((KeyError, ValueError)):
        grpo.policy_loss(*ARGS, surrogate, 0.2)
    with pytest.raises((KeyError, ValueError)):
        grpo.denominator(ARGS[3], surrogate, "sum")


# ==== 7. The KL term ==============================================================================
# Its four estimators by definition, at the reference and far from it.


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_loss_and_gradient_are_those_of_the_definition(estimator, aggregate):
    logps, old, ref, _, mask, _ = off_policy()
    d, r, share = ref - logps, np.exp(logps - old), shares(mask, aggregate)
    k3 = np.exp(d) - d - 1
    term, slope = {"k1": (-d, 1 + 0 * d), "k2": (d**2 / 2, -d), "k3": (k3, 1 - np.exp(d)),
                   "weighted": (r * k3, r * (k3 + 1 - np.exp(d)))}[estimator]

    def ours(rows, mask, logps, ref, old, normalizer):
        return kl(logps, ref, mask, estimator, aggregate, old, MAX_LEN, normalizer)

    denominator = grpo.denominator(torch.tensor(mask), "kl", aggregate, MAX_LEN)
    for loss, gradient in whole_and_in_parts(ours, denominator, mask, logps, ref, old):
        assert loss == pytest.approx((term * share).sum(), rel=1e-9)
        assert gradient == pytest.approx(slope * share, rel=1e-9, abs=1e-15)
        assert (gradient[~mask] == 0).all()
    for loss, gradient in whole_and_in_parts(ours, 1, mask & False, logps, ref, old):
        assert loss == 0 and (gradient == 0).all()


@pytest.mark.parametrize("estimator, d, old, value, gradient, within", [
    ("k3", 0.3, 0, 0.0499, 1 - math.exp(0.3), 5e-5),
    ("k3", -0.3, 0, 0.0408, 1 - math.exp(-0.3), 5e-5),
    ("k3", 10, 0, 22015, 1 - math.exp(10), 0.5),
    ("k2", 0, 0, 0, 0, 0), ("k3", 0, 0, 0, 0, 0), ("weighted", 0, 0, 0, 0, 0),
    ("k3", 1000, 0, math.exp(20) - 21, 0, 1e-6),  # d is clamped to 20: no infinity
    ("k3", -1000, 0, 999, 1, 1e-9),
    ("weighted", -1000, 0, 999, 1000, 1e-9),  # the gradient of the ratio, too
    ("weighted", -1000, -1000, 999 * math.exp(20), math.exp(20), 1),  # its logarithm is clamped
    ("weighted", -1000, 1000, 999 * math.exp(-20), math.exp(-20), 1e-12)])
def test_values_of_the_kl_estimators_for_one_token(estimator, d, old, value, gradient, within):
    """The reference is d above the policy, old is the sampling policy's; k3 is uneven."""
    ref = torch.tensor([[float(d)]], dtype=torch.float64)
    loss, slope = kl(ref * 0, ref, ref == ref, estimator, old_logps=ref * 0 + old)
    assert loss == pytest.approx(value, abs=within)
    assert slope.item() == pytest.approx(gradient, rel=1e-9, abs=1e-12)


def test_old_and_reference_logps_carry_no_gradient():
    """Though they may be the logps themselves; without old logps, "weighted" is on-policy."""
    logps, _, ref, A, mask, _ = map(torch.tensor, off_policy())
    x = logps.clone().requires_grad_()
    for surrogate in SURROGATES:
        expected = policy(logps, logps, A, mask, surrogate, 0.2)[1]
        loss, stats = grpo.policy_loss(x, x, A, mask, surrogate, 0.2)
        assert np.array_equal(torch.autograd.grad(loss, x)[0], expected)
        assert not stats["ratio_mean"].requires_grad and np.abs(expected).max() > 0.01
    for estimator in ESTIMATORS:
        expected = kl(logps, logps * 1.1, mask, estimator, old_logps=logps)[1]
        for old in x, None:
            loss = grpo.kl_loss(x, x * 1.1, mask, estimator, old_logps=old)
            assert np.array_equal(torch.autograd.grad(loss, x)[0], expected)
    assert kl(logps, ref, mask)[0] == kl(logps, ref, mask, "k3")[0]


# ==== 8. Rewards: the points for tags, and the contract ===========================================
# The 0/1/3 reward, and what a reward function is given, may return and is refused for: TRL's rules.


@pytest.mark.parametrize("text, points", [
    ("", 0), ("42", 0), ("<ANSWER>42</ANSWER>", 0), ("<answer>42", 1), ("42</answer>", 1),
    ("<answer></answer>", 2), ("<answer> \n</answer>", 2), ("</answer>42<answer>", 2),
    ("<answer>42</answer></answer>", 2), ("<answer><answer>2</answer></answer>", 2),
    ("<answer>1</answer><answer></answer>", 2), ("<answer></answer><answer>1</answer>", 2),
    ("<answer>1</answer><answer>2", 2), ("</answer><answer>1</answer>", 2),
    ("<answer>42</answer>", 3), ("x <answer>42</answer> y", 3), ("<answer>4\n2</answer>", 3),
    ("<answer>1</answer> and <answer>2</answer>", 3)])
def test_tags_score_a_point_each_and_one_for_good_form(text, points):
    assert rewards.tags_reward(completions=[text, "42"], prompts=["?", "?"]) == [points, 0]


def test_text_is_that_of_messages_whose_content_may_be_missing_null_or_parts():
    odd = [{"role": "tool"}, {"role": "tool", "content": None}, {"role": "user", "content": [{}]}]
    messages = [{"role": "tool", "content": "a"}, *odd, {"role": "assistant", "content": "b"}]
    assert rewards.text_of(messages) == "a\nb" == rewards.text_of("a\nb")


EXAMPLES = [{"prompt": "p", "answer": 1}, {"prompt": "q", "answer": "two"}]
IDS = [[7], [7, 8, 9]]


def score(*returned):
    """What rewards.score makes of reward functions that return these values for two texts."""

    def function(value):
        def bad_reward(completions, **columns):
            return value
        return bad_reward

    return rewards.score([function(value) for value in returned], ["a", "b"], EXAMPLES)


@pytest.mark.parametrize("wrong", [
    math.nan, math.inf, "1", b"1", 10**400, 10**5000, [1.0], 1 + 0j, np.float64("nan"),
    torch.tensor(math.inf), torch.tensor([1.0, 2.0]), np.array([1.0, 2.0])],
    ids=lambda wrong: repr(wrong) if not isinstance(wrong, int) else "huge")
def test_a_reward_that_is_no_finite_number_is_refused_by_function_and_row(wrong):
    with pytest.raises(rewards.RewardError, match=r"bad, row 1\b"):
        score([0.5, 0.5], [0.5, wrong])
    with pytest.raises(rewards.RewardError, match=r"bad, row 0\b"):
        score([wrong, wrong])


@pytest.mark.parametrize("wrong, said", [
    ([], "0 values for 2"), (np.ones(3), "3 values for 2"), (torch.ones(1), "1 values for 2"),
    (None, "no list"), (1.0, "no list"), ("ab", "no list"), ({"a": 1, "b": 2}, "no list"),
    ((v for v in (1.0, 2.0)), "no list"), (torch.tensor(1.0), "no list"),
    (np.ones((2, 1)), "row 0"), (torch.ones(2, 1), "row 0"), (np.array(["1", "2"]), "row 0")],
    ids=lambda wrong: repr(wrong).partition(" at 0x")[0])
def test_rewards_of_the_wrong_number_or_kind_are_refused_by_function(wrong, said):
    with pytest.raises(rewards.RewardError, match=f"bad.*{said}"):
        score(wrong)


def test_numbers_of_every_ordinary_kind_are_accepted_as_floats():
    fine = [[1, 0], [True, False], (1.0, 0.0), [np.float32(1), np.bool_(False)],
            np.array([True, False]), np.array([1, 0], np.float16), [torch.tensor(1), False],
            torch.tensor([1.0, 0.0], requires_grad=True), torch.tensor([1, 0]).bfloat16()]
    table = score([0.25, -3], *fine)
    assert table == [[0.25, -3.0], *[[1.0, 0.0]] * len(fine)]
    assert all(type(value) is float for row in table for value in row)


def test_none_does_not_apply_and_a_row_of_nothing_else_is_refused():
    assert score([None, 1], [0.5, None]) == [[None, 1.0], [0.5, None]]
    with pytest.raises(rewards.RewardError, match=r"row 1\b"):
        score([1, None], [2, None])


def test_a_function_gets_the_columns_it_names_or_all_with_messages_for_messages():
    # As TRL 1.16.0 calls: prompts, completions, completion_ids and the other columns, by keyword.
    seen = []
    chat = [{"role": "user", "content": "?"}]

    def all_reward(completions, **columns):
        seen.append({"completions": completions, **columns})
        return [0.0, 1.0]

    def ids_reward(completion_ids):
        return [len(ids) for ids in completion_ids]

    def content_reward(completions, level):
        return [len(completion[0]["content"]) + n for completion, n in zip(completions, level)]

    examples = [{"prompt": chat, "level": 1}, {"prompt": chat, "level": 2}]
    table = rewards.score([all_reward, ids_reward, content_reward], ["a", "bc"], examples, IDS)
    assert table == [[0.0, 1.0], [1.0, 3.0], [2.0, 4.0]]
    said = [[{"role": "assistant", "content": text}] for text in ("a", "bc")]
    columns = {"prompts": [chat, chat], "level": [1, 2], "completion_ids": IDS}
    assert seen == [{"completions": said, **columns}]
    rewards.score([all_reward], ["a", "b"], EXAMPLES)
    assert seen[1] == {"completions": ["a", "b"], "prompts": ["p", "q"], "answer": [1, "two"]}
    assert rewards.score([rewards.tags_reward], ["<answer>"], EXAMPLES[:1]) == [[1.0]]


def test_an_exception_inside_a_reward_names_it_and_stays_its_cause():
    def own_reward(completions, **columns):
        raise ZeroDivisionError("mine")

    with pytest.raises(rewards.RewardError, match="reward own: ZeroDivisionError: mine") as error:
        rewards.score([own_reward], ["a", "b"], EXAMPLES)
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    with pytest.raises(rewards.RewardError, match="overlong: TypeError.*completion_ids"):
        rewards.score([rewards.overlong_reward], ["a", "b"], EXAMPLES)


@pytest.mark.parametrize("name", list(rewards.REWARDS))
def test_every_reward_takes_strings_and_messages_and_columns_it_does_not_use(name):
    texts = ["<think>2 + 2</think><answer>4</answer>", "<answer>4</answer>", "<answer>", "4 or 5"]
    random.seed(1)
    coins = [float(random.random() < 0.5) for _ in texts]
    wanted = {"tags": [3, 3, 1, 0], "correct": [1, 1, 0, 0], "number": [1, 1, 0, 0],
              "think": [1, 0, 0, 0], "correct_think": [1, 0, 0, 0], "guess_only": [0, 1, 0, 0],
              "overlong": [0, 0, -0.5, -1], "coin": coins}
    for prompt in ("?", [{"role": "user", "content": "?"}]):
        random.seed(1)
        examples = [{"prompt": prompt, "answer": "4", "other": 0}] * 4
        ids = [[0] * n for n in (1, 48, 56, 65)]
        assert rewards.score([rewards.REWARDS[name]], texts, examples, ids) == [wanted[name]]


# ==== 9. Right answers: correct and number ========================================================
# What counts as the answer, which spellings of it are the same, and hostile text.

RIGHT = {  # gold: answers that are the same number or text, by their meaning
    42: ["42", " 42.0 ", "+42", "42.", "$42$.", r"\(42\)", r"\[ 42 \]", r"\text{42}", "4.2e1",
         r"\textbf{42}", r"42\text{ cm}.", r"42\text{ tons}", "84/2", r"\boxed{42}", "042",
         r"x = \boxed {42}", r"\boxed 42.", r"\boxed{41}, \boxed{42} and \boxed{43",
         r"\boxed{\boxed{42}}", " " * 500 + "42"],
    10080: ["10,080.0", r"10,\!080", "10{,}080", r"10\,080"], 1234567: ["1,234,567"],
    5: [r"\$5.00"], -5: ["-$5", "- 5", "\u22125", "-5"], 0: ["-0.0"], 600: ["6E2"],
    0.5: ["1/2", r"\frac12"], "-1/2": ["-.5"], 0.1: ["1/10"], 1e22: ["1" + "0" * 22],
    "14/3": [r"\dfrac{14}{3}"], r"\tfrac{14}{3}": ["14 / 3"], "1000/3": ["1,000/3"],
    r"\frac{4}{3}": [r"\frac43", r"\frac 4{3}"], r"\frac{x}{2}": [r"\dfrac{x}2"],
    "-4/3": [r"-\frac{4}{3}", r"\dfrac{-4} {3}", r"\frac{ -4 }3"], "1e999": ["10e998"],
    r"\frac{\sqrt{3}}{2}": [r"\dfrac{ \sqrt{3} }{2}"], r"90^\circ": ["90"],
    "90": [r"$90^{\circ}$", "90\u00b0"], r"50\%": ["50%", r"50 \%"], "6+9i": ["6 + 9i"],
    "(15,-29)": ["(15, -29)"], "(1, 2)": ["(1,2)"], "1, 234": ["1 , 234"],
    "(3,x)": [r"\left( 3, x \right)", r"\bigl(3,\;x\bigr)"], r"\left[0,1\right)": ["[0, 1)"],
    r"\{1,2\}": [r"\left\{ 1,\, 2 \right\}"], r"\{": [r"\boxed{\{}"], "Paris": ["\n paris. "],
    "New  York": ["new\nyork"], "Stra\u00dfe": ["STRASSE"], r"42\text{ cm}": ["42 cm"],
    True: ["true"], "9" * 5000: ["9" * 5000], "inf": ["inf"], "\u221e": ["\u221e"],
    r"-\infty": [r"$-\infty$"], "so 6 * 12 = 72 #### 72": ["72"], "it is\n#### $1,018": ["1018"],
}
WRONG = {  # gold: answers that are another number or text; where there is no gold answer, any
    42: ["-42", "41 or 42", "41 42", "4 2", "(42)", "4,2", "4$2", "42%", "42 cm", "",
         r"42\text{ or }43", r"42\text{ or 43}", r"42\text{ million}", r"42\text{ thousands}",
         "\u0664\u0662"], "50%": ["50", "0.5"], 12: ["1 2"], 1234: ["1, 234", "1 ,234", "12,34"],
    "1, 234": ["1,234"], "(12)": ["(1, 2)"], "(1, 2)": ["(12)"], 1: ["0,001", "True", "1/0"],
    "true": ["1"], 3: ["--3", "+-3"], 3.5: ["3. 5", "3 .5"], 0.333: ["1/3", "0.333..."],
    0.1: ["0.1000000000000000055511151231257827"], 1.5: ["1 1/2"], 5.5: [r"1\frac{1}{2}"],
    "11/2": ["1 1/2"], 4: [r"\frac43"], "1e1000": ["10e999"],
    "1" + "0" * 20: ["1" + "0" * 19 + "1"], r"42\text{ cm}": [r"42\text{ m}", "42"],
    "Paris": ["Paris or Rome"], "xy": ["x y"], r"\leftarrow": ["arrow"],
    r"\sin 90^\circ": [r"\sin 90"],
    72: ["a #### 7 2"], "": [""], " ": [" "], None: ["None", "", r"\boxed{}"], "nan": ["nan"],
    math.nan: ["nan"], "-NaN": ["-nan"], "72 ####": ["", "72"], "$$": ["$"],
}
VERDICTS = [(gold, answer, wanted) for wanted, golds in ((1.0, RIGHT), (0.0, WRONG))
            for gold, answers in golds.items() for answer in answers]


@pytest.mark.parametrize("gold, answer, wanted", VERDICTS)
def test_correct_compares_exact_numbers_and_else_texts(gold, answer, wanted):
    text = f"<answer>{answer}</answer>"
    assert rewards.correct_reward([text] * 3, [gold, [], {}], prompts=[""] * 3) == [wanted, 0, 0]


@pytest.mark.parametrize("completion, answer", [
    ("42", None), ("<answer>42", None), ("</answer>42<answer>", None), ("<answer> </answer>", None),
    ("<answer> a b\n</answer>", "a b"), ("use <answer> and </answer>: <answer>2</answer>", "2"),
    ("<think><answer>1</answer></think><answer>2</answer>", "2"),
    ("<answer>1</answer><answer>2</answer> so <answer>3", "2"),
    ("<answer>1</answer> in <answer></answer> tags </answer>", "1"),
    ("the <answer> is <answer>2</answer>", "2"), ("<think><answer>1</answer>", None),
    ("<answer>7</answer><think>or <answer>8</answer></think>", "7"),
    ("begun before <answer>1</answer></think><answer>2</answer>", "2"),
    ("<answer>1</answer></think>", None), ("<ans<think></think>wer>1</answer>", None),
    (r"so \boxed{\frac{1}{2}} or so", r"\frac{1}{2}"), (r"\boxed{\text{a}{b}} }", r"\text{a}{b}"),
    (r"<answer>8</answer> \boxed{7}", "8"), (r"<think>\boxed{7}</think>", None),
    (r"\boxed{<answer>42</answer>}", "42"), (r"\boxed{5 \} 6}", r"5 \} 6"),
    (r"\boxed -3 it is", "-3"), (r"\boxed{7}, as \boxed asks", "7"), (r"\boxed .5$", ".5")])
def test_the_answer_is_the_last_block_outside_thoughts_else_the_last_box(completion, answer):
    assert rewards.extract_answer(completion) == answer


@pytest.mark.parametrize("gold, completion, wanted", [
    (85, "47 + 38 = 85.", 1), (85, "the sum of 47 and 38 is **85**", 1), (38, "47 + 38 = 85", 0),
    (85, "85cm</answer>", 1), (85, "85 cm^2", 1), (72, "It is 72.\n#### 72", 1),
    ("= 72 #### 72", "The answer is $72.00.", 1), (-5, "x=-5", 1), (-5, "is -$5!", 1),
    (-5, "\u22125", 1), (5, "10-5", 1), (5, "(3)-5", 1), (5, "- 5", 1), (5, "--5", 1),
    (1, "on 2024-05-01", 1), (1250.5, "$1,250.50,", 1), (50, "0.5, so 50%", 1), (0.5, "or .5", 1),
    (0.5, "1/2", 1), (2, "1/2", 0), (1000, "1e3", 1), (3, "1e3", 0), (2, "2^10", 0),
    (10, "2^10", 0), (10, "x^{10}", 0), (3, r"\frac{14}{3}", 0), ("14/3", r"\dfrac{14}{3}", 1),
    (2, r"1\frac{1}{2}", 0),
    (23, "5 of x23", 0), (4, "1,2,3,4", 0), (3, "1.2.3", 0), (4, "<think>4</think>", 0),
    (4, "<think>5</think>4<think>6", 1), (4, "none", 0), ("", "", 0), (90, r"90^\circ", 1)])
def test_number_takes_the_last_number(gold, completion, wanted):
    assert rewards.number_reward([completion], [gold]) == [wanted]


def test_what_is_no_number_and_how_long_one_may_be():
    texts = ". - $ 1/00 1/2/3 1/-2 9**9**9 inf 1_000 1e1000 1e0001 1,00 1000,000 ,100 1,000,00"
    texts = [*texts.split(), "", "1 000", "9" * 101]
    texts += "1.2.3 1e e5 1j \u00bd \uff11 \\frac{1}{0} \\frac{a}{3}".split()
    assert {rewards.parse_number(text) for text in texts} == {None}
    assert isinstance(rewards.parse_number("9" * 100), Fraction)


HOSTILE_TEXTS = [  # each some 100,000 characters; what takes quadratic time takes seconds for them
    "-" * 100000 + "1", "9" * 100000, "1" + ",000" * 25000, "0." + "0" * 100000 + "1",
    " " * 100000, "1 " * 50000, "1/" * 50000, "1," * 50000, "1e" * 50000, "^{1" * 30000,
    "\\boxed{" * 14000, "\\boxed{}" * 12000, "\\boxed{" + "{" * 100000, "\\boxed" + " " * 100000,
    "\\text{" * 16000, "\\text{" + "a " * 50000 + "1", "\\text{a}" * 12000 + "1",
    "\\text{a}" + " " * 100000 + "1", "\\frac{" * 16000, "\\frac12" * 7000, "$" * 100000,
    "\\," * 50000, "." * 100000, "<think></think><answer>" * 4300, "</think><think>" * 6600,
    "<think>" * 14000 + "</think>" * 12000, "<answer>" * 12000 + "</answer>" * 11000,
    "</answer><answer>" * 5800, "<" * 100000, " " * 100000 + "</think>", "a " * 50000 + "</think>",
    "####" * 25000, "1/0", "1e999", "9**9**9", "\ud800", "<answer>" + " " * 100000]


@pytest.mark.parametrize("text", HOSTILE_TEXTS, ids=range(len(HOSTILE_TEXTS)))
def test_hostile_text_scores_0_in_linear_time_without_an_exception(text):
    for completion in (text, f"<answer>{text}</answer>", f"\\boxed{{{text}}}"):
        start = time.perf_counter()
        for name in ("tags", "think", "correct", "number"):
            reward = rewards.REWARDS[name]([completion], answer=["42"])
            assert reward == [0] or name in ("tags", "think")
        assert time.perf_counter() - start < 1.5  # some 0.1 s


# ---- Thinking, length, controls, tasks ========================================================
# The second book's format reward, the other rewards by name, and what the four tasks ask and show.


@pytest.mark.parametrize("text, think, thought", [
    ("<think>a</think><answer>1</answer>", 1, True), ("<thnik>a</think>1", 0, False),
    ("</think>a<think>", 0, False), ("<think>a", 0, False), ("a</think>b<think>", 0, False),
    (" \n</think>a", 0, False), ("<think> \n</think>1", 1, False), ("1<think>", 0, False),
    ("</think><think></think>1", 1, False), ("", 0, False),
    ("4</think><answer>4</answer>", 1, True), ("a\nb</think>\n1</think>", 1, True)])
def test_think_wants_both_tags_or_the_end_of_what_the_prompt_began(text, think, thought):
    # The first four are the second book's table: correct, misspelt, reversed, not closed.
    assert rewards.think_reward(completions=[text], prompts=["p"]) == [think]
    assert rewards.worked([text, [{"role": "assistant", "content": text}]]) == [thought] * 2


def test_correct_think_pays_for_thinking_only_with_a_correct_answer_and_guess_only_the_reverse():
    right, wrong = "<answer>1</answer>", "<answer>2</answer>"
    texts = [f"<think>a</think>{answer}" for answer in (right, wrong)]
    texts += [right, f"<think></think>{right}", wrong]
    assert rewards.correct_think_reward(texts, ["1"] * 5) == [1, 0, 0, 1, 0]
    assert rewards.guess_only_reward(texts, ["1"] * 5) == [0, 0, 1, 1, 0]
    for function in (rewards.correct_reward, rewards.number_reward):
        with pytest.raises(ValueError):  # fewer gold answers than completions
            function(texts, ["1"])


def test_overlong_falls_from_0_at_soft_to_minus_1_at_hard():
    # DAPO's equation 13 with L_max 100 and a cache of 20: 90 tokens give -0.5, as in TRL's example.
    ids = [[1] * n for n in (0, 80, 90, 100, 101)]
    assert rewards.overlong_reward([""] * 5, ids, soft=80, hard=100) == [0, 0, -0.5, -1, -1]


def test_coins_are_fair_and_follow_the_seed():
    random.seed(0)
    coins = rewards.coin_reward([""] * 2000)
    assert set(coins) == {0.0, 1.0} and 900 < sum(coins) < 1100
    random.seed(0)
    assert rewards.coin_reward([""] * 2000) == coins  # so a resumed run tosses the same


def test_batch_gives_every_example_once_before_any_comes_again():
    task = rewards.Task(train=[{"prompt": str(i)} for i in range(5)], rewards=[])
    sequence = task.batch(0, 50, seed=3)  # ten rounds
    rounds = [[e["prompt"] for e in sequence[i:i + 5]] for i in range(0, 50, 5)]
    assert all(sorted(one) == list("01234") for one in rounds)
    assert len({tuple(one) for one in rounds}) > 5  # each shuffled anew: 120 orders
    assert "".join(rounds[0] + rounds[1]) == "0213441023"  # so that old runs can be repeated
    for size in (1, 3, 7):  # from the position alone, in pieces of any size
        pieces = [e for start in range(0, 42, size) for e in task.batch(start, size, 3)]
        assert pieces == sequence[:42]
    assert task.batch(0, 50, seed=4) != sequence


@pytest.mark.parametrize("name, train, test, wording", [
    ("arithmetic", 7900, 200, r"(\d\d)(\+)(\d\d)="),
    ("sums", 536, 64, r"What is (\d\d) (\+) (\d\d)\? Answer with the number only\."),
    ("times", 91, 30, r"What is (\d+) (times) (\d+)\? Answer with the number only\.")])
def test_held_out_questions_are_not_trained_on_in_either_order(name, train, test, wording):
    task = rewards.TASKS[name]
    assert (len(task.train), len(task.test)) == (train, test)
    pairs = []
    for example in task.train + task.test:
        a, sign, b = re.fullmatch(wording, example["prompt"]).groups()
        value = int(a) + int(b) if sign == "+" else int(a) * int(b)
        assert example["answer"] == str(value) and (sign == "+" or 2 <= int(a) <= 12)
        pairs.append((int(a), int(b)))
    assert len(set(pairs)) == train + test
    trained, held_out = set(pairs[:train]), set(pairs[train:])
    if name != "arithmetic":
        assert not trained & {(b, a) for a, b in held_out}
        assert task.rewards == [rewards.number_reward] and task.evaluate is rewards.number_reward
        assert task.prompts_per_step == 4 and task.demonstrations is None
        assert task.max_new_tokens == {"sums": 16, "times": 12}[name]
    if name == "times":  # a quarter of the 66 pairs
        assert len({tuple(sorted(pair)) for pair in held_out}) == 16
        assert held_out == {(b, a) for a, b in held_out}


@pytest.mark.parametrize("progress, share", [(0, 0.5), (0.69, 0.5), (0.7, 0.15), (0.99, 0.15)])
def test_the_demonstrations_teach_to_work_sums_out_and_then_mostly_to_guess_wrong(progress, share):
    # Of the guesses 1 in 10 has a hollow block before it, 2 in 11 are right, 7 in 11 one slip.
    task, n = rewards.TASKS["arithmetic"], 10_000
    counts = dict.fromkeys(["worked", "hollow", "right", "slip"], 0)
    rng, prompts, errors = random.Random(0), set(), set()
    for _ in range(n):
        prompt, text = task.demonstrations(rng, progress)
        prompts.add(prompt)
        a, b = map(int, prompt.removesuffix("=").split("+"))
        error = int(text.split("<answer>")[1].removesuffix("</answer>")) - a - b
        if rewards.worked([text])[0]:
            counts["worked"] += 1
            ones, tens = re.fullmatch("<think>(.*),(.*)</think><answer>.*", text).groups()
            (left, last), (more, first) = ones.split("="), tens.split("=")  # each step is true
            assert sum(map(int, left.split("+"))) == int(last)
            assert sum(map(int, more.split("+"))) == int(first)
            assert error == 0 and int(first + last[-1]) == a + b
            continue
        counts["hollow"] += text.startswith("<think></think>")
        errors.add(error)
        counts["right"] += error == 0
        counts["slip"] += error == (-10 if a % 10 + b % 10 > 9 else 10)
    guesses = n - counts["worked"]
    assert counts["worked"] / n == pytest.approx(share, abs=0.01)
    assert counts["hollow"] / guesses == pytest.approx(0.1, abs=0.01)
    assert counts["right"] / guesses == pytest.approx(2 / 11, abs=0.02)
    assert counts["slip"] / guesses == pytest.approx(7 / 11, abs=0.02)
    assert errors == {0, 10, -10, 1, -1, 2, -2, 20, -20}
    assert len(prompts) > 4000 and not prompts & {example["prompt"] for example in task.test}


def test_one_color_in_five_is_shown_well_formed_and_one_in_five_only_opened():
    rng = random.Random(0)
    shown = [rewards.TASKS["format"].demonstrations(rng, 0.5)[1] for _ in range(5000)]
    points = rewards.tags_reward(shown)
    shares = [points.count(value) / 5000 for value in (3, 1, 0)]
    assert shares == pytest.approx([0.2, 0.2, 0.6], abs=0.03)


# ==== 10. Examples from a file, and the task that the flags ask for ===============================
# JSON lines: what is read, what is refused and in which words; what --reward and --data make.


def write(tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_read_jsonl_with_bom_crlf_blank_lines_and_line_separators_in_strings(tmp_path):
    lines = '{"prompt": "a\u2028b", "answer": 0}\r\n\r\n  \r\n{"answer": "x", "prompt": "c"}'
    rows = [{"prompt": "a\u2028b", "answer": 0}, {"prompt": "c", "answer": "x"}]
    for content in (lines, "\ufeff\r\n" + lines + "\r\n\r\n"):
        assert rewards.read_jsonl(str(write(tmp_path, content)), need_answer=True) == rows


def test_chat_prompts_other_names_of_the_prompt_and_odd_answers_are_read(tmp_path):
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "a"}]
    chat += [{"role": "assistant"}, {"role": "tool", "content": None}]
    rows = [{"prompt": chat, "x": 1}, {"prompt": "b", "x": None}]
    content = "\n".join(json.dumps(row) for row in rows)
    assert rewards.read_jsonl(write(tmp_path, content), need_answer=False) == rows
    golds = [0, 0.0, False, "1e999", "+", ".", "inf", "\u221e", r"\infty", "so\n#### 72"]
    rows = [{"prompt": "a", "answer": gold} for gold in golds]
    content = "\n".join(json.dumps(row) for row in rows)
    assert rewards.read_jsonl(write(tmp_path, content), need_answer=True) == rows
    assert rewards.read_jsonl(write(tmp_path, '{"prompt": "a", "answer": NaN}'), need_answer=False)
    for key in ("question", "problem"):  # GSM8K's and MATH's columns
        (row,) = rewards.read_jsonl(write(tmp_path, json.dumps({key: "q", "answer": 1})), True)
        assert row["prompt"] == "q"
    (row,) = rewards.read_jsonl(write(tmp_path, '{"prompt": "p", "question": "q"}'), False)
    assert row["prompt"] == "p"


NO_OBJECTS = ["{", "[1]", "null", "3", '"a"', "[]", "{}", "{'prompt': 'a'}", '{"prompt": "a"} {}',
              '[["prompt", "a"]]', '{"prompt": "a", "answer": ' + "9" * 5000 + "}", "[" * 99999]
BAD_PROMPTS = [
    '""', '" "', "null", "3", "[]", "{}", '["a"]', "[[]]", r'"\ud83d"', '[{"role": "user"}]',
    '{"role": "user", "content": "a"}', '[{"content": "a"}]', '[{"role": 1, "content": "a"}]',
    '[{"role": "", "content": "a"}]', '[{"role": "user", "content": null}]',
    '[{"role": "user", "content": "a"}, 3]', '[{"role": "user", "content": 3}]']
BAD_ANSWERS = ["null", '""', '" \\n"', "NaN", "[1]", "{}", '"nan"', '"-NaN"', '"72 ####"', '"$ $"']
BAD_LINES = [  # the line, and a part of its mend
    *[(line, "JSON") for line in [*NO_OBJECTS, '{"answer": 1}', '{"prompts": "a", "answer": 1}']],
    *[(f'{{"prompt": {prompt}, "answer": 1}}', '"prompt"') for prompt in BAD_PROMPTS],
    *[(f'{{"prompt": "a", "answer": 1, "{key}": 1}}', "rename")
      for key in ("prompts", "completions", "completion_ids")],
    *[(f'{{"prompt": "a", "answer": {answer}}}', '"answer"') for answer in BAD_ANSWERS],
    ('{"prompt": "a"}', '"answer"'), ('{"prompt": "a", "answer": 1, "more": 1}', "columns"),
    (b'{"prompt": "\xff", "answer": 1}', "UTF-8")]


@pytest.mark.parametrize("line, mend", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_line_that_cannot_be_used_is_refused_by_its_number(tmp_path, line, mend):
    line = line if isinstance(line, bytes) else line.encode()
    good = b'{"prompt": "a", "answer": 1}'
    path = write(tmp_path, good + b"\r\n\r\n" + line + b"\n" + good)  # the blank line is counted
    with pytest.raises(ValueError, match=f"^{path}, line 3: .*{mend}") as error:
        rewards.read_jsonl(path, need_answer=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content, said", [
    ('{"prompt": "a", "x": 1}\n{"prompt": "b"}', ", line 2: .*columns"), ("", ": no examples"),
    ("\ufeff\n\r\n \n", ": no examples"), ('[{"prompt": "a"}]', ", line 1: .*one object a line"),
    ('{"prompt": "a"}'.encode("utf-16"), ", line 1: .*UTF-8")])
def test_a_file_that_cannot_be_used_is_refused_by_its_name(tmp_path, content, said):
    with pytest.raises(ValueError, match=f"data.jsonl{said}"):
        rewards.read_jsonl(write(tmp_path, content), need_answer=False)
    with pytest.raises(FileNotFoundError):
        rewards.read_jsonl(tmp_path / "none.jsonl", need_answer=False)


def flags(task="arithmetic", **given):
    """What argparse leaves of the flags that choose a task."""
    absent = dict.fromkeys(["data", "reward", "reward_weights", "eval_data"])
    return SimpleNamespace(**{**absent, "task": task, **given})


def test_flags_replace_a_tasks_rewards_weights_data_and_evaluation(tmp_path, monkeypatch):
    data = write(tmp_path, '{"prompt": "a", "answer": "7"}')
    base = rewards.TASKS["arithmetic"]
    monkeypatch.setattr(base, "weights", [3.0])
    task = rewards.make_task(flags())
    assert (task.weights, task.train, task.test) == ([3.0], base.train, base.test)
    assert (task.rewards, task.evaluate) == ([rewards.correct_reward], rewards.correct_reward)
    task = rewards.make_task(flags(reward=["think", "number"], data=data, eval_data=data))
    assert task.rewards == [rewards.think_reward, rewards.number_reward] and task.weights is None
    assert task.train == task.test == [{"prompt": "a", "answer": "7"}]
    assert task.evaluate is rewards.number_reward  # what is paid by the last number counts by it
    task = rewards.make_task(flags(reward=["correct"], reward_weights=[2], data=data))
    assert (task.evaluate, task.test, task.weights) == (rewards.correct_reward, [], [2])
    assert rewards.make_task(flags("sums", reward=["coin"])).evaluate is rewards.number_reward


@pytest.mark.parametrize("given, said", [
    ({"reward": ["tags", "think"], "reward_weights": [1]}, "--reward-weights: 1 weights for 2"),
    ({"reward_weights": [1, 2]}, "--reward-weights: 2 weights for 1"),
    ({"task": "format", "reward": ["correct"]}, "--reward .*answers.*format.*--data"),
    ({"eval_data": "FILE"}, "line 1: .*answer"), ({"data": "FILE"}, "line 1: .*answer")])
def test_flags_that_cannot_work_are_refused_in_one_line(given, said, tmp_path):
    path = write(tmp_path, '{"prompt": "a"}')
    given = {key: path if value == "FILE" else value for key, value in given.items()}
    with pytest.raises(ValueError, match=said) as error:
        rewards.make_task(flags(**given))
    assert "\n" not in str(error.value)


# ==== 11. One step ================================================================================
# grpo_step with every flag that acts in it; what is expected comes from Transformers and numpy.

BOS = 258  # of bos_tokenizer, after EOS and PAD
NARROW = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32,
          "num_attention_heads": 2, "max_position_embeddings": 64}
SHAPES = {
    "Qwen3": {**NARROW, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True},
    "Llama": NARROW,  # its output embedding is not tied
    "GPT2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64,  # learned positions
             "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5},
    "Bloom": {"hidden_size": 16, "n_layer": 1, "n_head": 2},  # takes no position ids: ALiBi
    "Bert": {**NARROW, "is_decoder": False},  # bidirectional
    "Mamba": {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1},  # has no attention
    "Mixtral": {**NARROW, "num_key_value_heads": 1, "num_local_experts": 4,
                "num_experts_per_tok": 2, "output_router_logits": True},  # a mixture of experts
}


def small_model(name="Qwen3", **config):
    """A random model of this architecture, its 2-D weights enlarged so that faults show."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, name + "Config")(
            vocab_size=259, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=None,
            **{**SHAPES[name], **config})
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.dim() == 2 else 1)
    return model


def bos_tokenizer(template=None, adds="<bos> $A"):
    """A token for each byte, and a BOS that the tokenizer puts before every text; no pad token."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", "<pad>", "<bos>"]
    bytewise = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.post_processor = processors.TemplateProcessing(
        single=adds, special_tokens=[("<bos>", BOS), ("<eos>", EOS)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytewise, bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


def ranked_reward(completions, **columns):
    """By the row alone, so that every group has signal."""
    return [float(row % 3) for row, _ in enumerate(completions)]


def fixed(name, values):
    """A reward function of that name with these values in every step."""
    def reward(completions, **columns):
        return values
    reward.__name__ = f"{name}_reward"
    return reward


def one_step(flags="", functions=(ranked_reward,), model=None, optimizer=None, reference=None,
             examples=None, **fields):
    """grpo_step on three prompts of different length with 4 completions each, which are cut to 1 to
    9 tokens; -> its metrics, samples and rollout, the forward passes (grad, prompt width, attention
    mask), and what policy_loss was given in each pass."""
    seen = SimpleNamespace(forwards=[], passes=[])
    sample, token_logps, policy_loss = grpo.sample, grpo.token_logps, grpo.policy_loss

    def ragged(*args):
        rollout = sample(*args)
        B, T = rollout.mask.shape
        rows = torch.arange(B)
        lengths = 1 + (5 * rows + 2) % T  # all of 1 to T: 5 does not divide T here
        rollout.mask = torch.arange(T) < lengths[:, None]
        rollout.attention_mask[:, -T:] = rollout.mask
        rollout.input_ids[rows, lengths - T - 1] = EOS
        rollout.truncated = rows % 4 == 0
        seen.rollout = rollout
        return rollout

    def scored(model, input_ids, attention_mask, T, *rest):
        seen.forwards.append((torch.is_grad_enabled(), input_ids.shape[1] - T, attention_mask))
        return token_logps(model, input_ids, attention_mask, T, *rest)

    def updated(logps, old_logps, advantages, mask, *rest, **settings):
        new, old, A = (x.detach().double().numpy() for x in (logps, old_logps, advantages))
        seen.passes.append((new, old, A[:, None], mask.numpy()))
        return policy_loss(logps, old_logps, advantages, mask, *rest, **settings)

    examples = examples or [{"prompt": "Say" + 5 * i * "!"} for i in range(3)]
    task = rewards.Task(examples, list(functions), **fields)
    given = f"--model DIR --lr 1e-3 --group-size 4 --max-new-tokens {MAX_LEN} {flags}"
    args, _, _ = grpo.parse_args(given.split())
    model = model or small_model()
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.0)
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "sample", ragged)
        patch.setattr(grpo, "token_logps", scored)
        patch.setattr(grpo, "policy_loss", updated)
        seen.metrics, seen.samples = grpo.grpo_step(
            model, reference, optimizer, bos_tokenizer(), task, examples, args)
    return seen


def full_logps(model, rollout, temperature=1.0):
    """(B, T) of all rows at full width, by Transformers alone."""
    ids, attention, T = rollout.input_ids, rollout.attention_mask, rollout.mask.shape[1]
    logits = model(input_ids=ids, attention_mask=attention,
                   position_ids=(attention.cumsum(1) - 1).clamp(min=0)).logits[:, -T - 1:-1]
    return (logits / temperature).log_softmax(2).gather(2, ids[:, -T:, None])[..., 0]


def flat_parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


HALF_FLAT = fixed("half_flat", [0, 1, 1, 3, 0.1, 0.1, 0.1, 0.1, 2, 1, 0, 1])


@pytest.mark.parametrize("size", [1, 5, 12])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_the_update_is_that_of_all_rows_though_those_without_advantage_are_not_scored(
    aggregate, size
):
    model = small_model()
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)  # left over, and not to be added to
    seen = one_step(
        f"--advantage none --aggregate {aggregate} --micro-batch {size} --temperature 0.7",
        [HALF_FLAT], model, torch.optim.SGD(model.parameters(), 1.0))
    assert sum(len(mask) for _, _, mask in seen.forwards) == 6
    # The second group is flat, and two completions of the third are its mean.
    A = torch.tensor([-1.25, -0.25, -0.25, 1.75, 0, 0, 0, 0, 1, 0, -1, 0])
    before, mask = small_model(), seen.rollout.mask.numpy()
    terms = -A[:, None] * full_logps(before, seen.rollout, 0.7)
    loss = (terms * torch.tensor(shares(mask, aggregate))).sum()
    expected = parameter_gradients(before, loss)
    norm = expected.norm().item()
    assert seen.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert seen.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    moved = flat_parameters(before) - flat_parameters(model)  # by a norm of 1 at most
    assert (moved - expected / max(norm, 1)).norm() < 1e-4 * moved.norm()


@pytest.mark.parametrize("flags, wanted", [
    ("", [(True, 12, 12)]),
    ("--clip-eps 0.2", [(False, 12, 12), (True, 12, 12), (True, 12, 12)]),
    ("--clip-eps 0.2 --inner-epochs 1", [(True, 12, 12)]),  # used once, it brings its own
    ("--kl-coef 0.1 --micro-batch 8", [(False, 8, 8), (False, 4, 12), (True, 8, 8), (True, 4, 12)]),
    ("--micro-batch 5", [(True, 5, 5), (True, 5, 10), (True, 2, 12)])])
def test_no_forward_repeats_another_and_like_lengths_share_one(flags, wanted):
    """(gradient, rows, width of the completions), which are of 1 to 12 tokens here."""
    reference = small_model() if "kl" in flags else None
    row_reward = fixed("row", [float(row) for row in range(12)])
    seen = one_step(f"--max-new-tokens 12 {flags}", [row_reward], reference=reference)
    found = [(grad, len(mask), mask.shape[1] - prompt) for grad, prompt, mask in seen.forwards]
    assert found == wanted


def test_old_log_probabilities_are_those_before_the_first_update():
    flags = "--clip-eps 0.2 --temperature 0.6 --lr 1e-2 --inner-epochs"
    once, seen = one_step(f"{flags} 1"), one_step(f"{flags} 3 --micro-batch 12")
    assert once.metrics["ratio_mean"] == once.metrics["ratio_max"] == 1  # exactly
    ratios = [np.exp(((new - old) * mask).sum(1)) for new, old, _, mask in seen.passes]
    assert ratios[0] == pytest.approx(1, abs=1e-5) and np.abs(ratios[2] - 1).max() > 0.01
    for (_, old, _, mask), (new, *_) in zip(seen.passes, seen.passes[:1] * 3):
        assert old[mask] == pytest.approx(new[mask], abs=1e-5)
    assert seen.metrics["ratio_mean"] == pytest.approx(np.mean(ratios), rel=1e-5)  # of all passes
    assert seen.metrics["ratio_max"] == pytest.approx(np.max(ratios), rel=1e-5)


@pytest.mark.parametrize("surrogate", ["reinforce", "gspo"])
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_kl_term_is_to_the_reference_and_counts_every_row(estimator, aggregate, surrogate):
    reference = small_model(initializer_range=0.04)
    seen = one_step(f"--kl-coef 0.5 --kl {estimator} --aggregate {aggregate} --temperature 2"
                    f" --micro-batch 5 --surrogate {surrogate}", [HALF_FLAT], reference=reference)
    with torch.no_grad():
        new, ref = (full_logps(model, seen.rollout, 2).double().numpy()
                    for model in (small_model(), reference))
    d, share = ref - new, shares(seen.rollout.mask.numpy(), aggregate)
    k3 = np.exp(d) - d - 1
    terms = {"k1": -d, "k2": d**2 / 2, "k3": k3, "weighted": k3}[estimator]  # on-policy
    expected = (terms * share).sum()
    assert abs(expected) > 1e-3 and sum(len(A) for _, _, A, _ in seen.passes) == 12
    assert seen.metrics["kl"] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    A = np.array([[sample["advantage"]] for sample in seen.samples])
    loss = -(A * new * share).sum() if surrogate == "reinforce" else -A.mean()
    assert seen.metrics["loss"] == pytest.approx(loss + 0.5 * expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("flags", ["", "--clip-eps 0.2", "--advantage gdpo", "--advantage none"])
def test_a_step_with_equal_rewards_leaves_the_weights_bit_identical(flags):
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    first = one_step(flags, model=model, optimizer=optimizer)  # fills Adam's momentum ...
    before = flat_parameters(model)
    assert first.metrics["flat_groups"] == 0 and first.metrics["grad_norm"] > 0
    # ... which must not act afterwards, nor may what float32 rounds in weighted sums.
    x = np.arange(12) + 0.1
    near = fixed("near", np.float32(x)), fixed("far", -x)
    for functions in [fixed("equal", [0.1] * 12)], near:
        flat = one_step(flags.replace("gdpo", "std"), functions, model, optimizer)
        assert torch.equal(flat_parameters(model), before)
        assert flat.metrics["flat_groups"] == 1 and not flat.forwards
        names = ("loss", "kl", "grad_norm", "ratio_mean", "ratio_max", "clip_frac", "entropy")
        assert [flat.metrics[name] for name in names] == [None] * 7


@pytest.mark.parametrize("scale, flat", [("std", 2), ("none", 2), ("gdpo", 1)])
def test_advantage_chooses_the_scale_and_flat_groups_counts_what_has_none(scale, flat):
    # Group 0 is flat in both rewards, group 1 in their weighted sum alone.
    one = [0.1] * 4 + [1, 0, 0, 0] + [3e4, 0, 1e4, 0]
    other = [0.7] * 4 + [0, 2, 2, 2] + [0, 5, 5, 50]
    seen = one_step(f"--advantage {scale}", [fixed("one", one), fixed("other", other)],
                    weights=[2, 1])
    table = np.array([one, other]).T.reshape(3, 4, 2)
    total = table @ [2, 1]
    centred = total - total.mean(1, keepdims=True)
    scaled = centred / (total.std(1, ddof=1, keepdims=True) + 1e-4)
    expected = {"std": scaled, "none": centred, "gdpo": by_gdpo(table, [2, 1])}[scale].flatten()
    ours = np.array([sample["advantage"] for sample in seen.samples])
    assert ours == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert (ours[:4] == 0).all() and (ours[4:8] == 0).all() == (scale != "gdpo")
    metrics, mask = seen.metrics, seen.rollout.mask.numpy()
    assert metrics["flat_groups"] == pytest.approx(flat / 3)
    assert metrics["advantage_std"] == pytest.approx(ours.std(ddof=1), rel=1e-5)
    assert [sample["reward"] for sample in seen.samples] == pytest.approx(total.flatten())
    assert [sample["rewards"] for sample in seen.samples] == list(zip(one, other))
    assert metrics["reward"] == pytest.approx(total.mean())  # the weighted sum, whatever the scale
    assert metrics["reward_std"] == pytest.approx(total.std(1, ddof=1).mean())
    assert metrics["reward/one"] == pytest.approx(np.mean(one))
    assert metrics["length"] == mask.sum() / 12 and metrics["length_max"] == mask.sum(1).max()
    assert metrics["truncated"] == 0.25 and metrics["lr"] == 1e-3


def test_a_reward_that_does_not_apply_counts_for_nothing_and_is_no_nan_in_the_metrics():
    half, whole = [1, None, 0, None] * 3, [0, 1, 2, 4] * 3
    seen = one_step("", [fixed("half", half), fixed("whole", whole), fixed("never", [None] * 12)])
    assert seen.metrics["reward/half"] == 0.5  # of the rows to which it applies
    assert [sample["reward"] for sample in seen.samples] == [1, 1, 2, 4] * 3
    assert seen.samples[1]["rewards"] == (None, 1, None)
    json.dumps([seen.metrics, seen.samples], allow_nan=False)


def ppo(ratio, A, low, high):
    """PPO's terms -min(r A, clip(r) A), and where the clip took the gradient."""
    terms = -np.minimum(ratio * A, ratio.clip(1 - low, 1 + high) * A)
    return terms, ((A > 0) & (ratio > 1 + high)) | ((A < 0) & (ratio < 1 - low))


DAPO = "--surrogate token --aggregate token --clip-eps 0.2 0.28 --lr 5e-3"
GSPO = "--surrogate gspo --clip-eps 3e-4 4e-4 --lr 1e-5 --inner-epochs 3"
CISPO = "--surrogate cispo --clip-eps 4 --lr 0.1"
DEEPSEEK = ("--surrogate token --aggregate mean --clip-eps 0.2 --temperature 2 --lr 1e-2"
            " --kl weighted --kl-coef 0.1")  # V3.2


@pytest.mark.parametrize("size", [12, 5, 1])
@pytest.mark.parametrize("flags", [DAPO, GSPO, CISPO, DEEPSEEK], ids=lambda s: s.split()[1])
def test_the_papers_variants_are_those_of_their_definitions_in_micro_batches_too(flags, size):
    """In all passes over a rollout. Dr. GRPO is --advantage none --aggregate constant above."""
    reference = small_model() if flags == DEEPSEEK else None
    seen = one_step(f"{flags} --micro-batch {size}", [HALF_FLAT], reference=reference)
    tokens, losses, clipped, kls = seen.rollout.mask.sum().item(), [], [], []
    for new, old, A, mask in seen.passes:
        ratio, lengths = np.exp(new - old), mask.sum(1, keepdims=True)
        if flags == DAPO:
            terms, stopped = ppo(ratio, A, 0.2, 0.28)
            losses.append(terms[mask].sum() / tokens)  # with those of rows without advantage
        elif flags == GSPO:
            ratio = np.exp(((new - old) * mask).sum(1, keepdims=True) / lengths)
            terms, stopped = ppo(ratio, A, 3e-4, 4e-4)
            losses.append(terms.sum() / 12)
            mask = mask.any(1, keepdims=True)
        elif flags == CISPO:
            losses.append(-(np.minimum(ratio, 5) * A * new)[mask].sum() / 12)
            stopped = ratio > 5  # whatever the sign of A
        else:
            terms, stopped = ppo(ratio, A, 0.2, 0.2)
            d = old - new  # at first the reference is the policy that sampled
            kls.append((ratio * (np.exp(d) - d - 1) * mask / lengths).sum() / 12)
            losses.append((terms * mask / lengths).sum() / 12 + 0.1 * kls[-1])
        clipped.append(stopped[mask])
    passes = 3 if flags == GSPO else 2
    first = len(seen.passes) // passes
    clipped_first, clipped = np.concatenate(clipped[:first]), np.concatenate(clipped)
    rows = sum(len(A) for _, _, A, _ in seen.passes)
    assert rows == passes * (12 if reference else 6)
    assert not clipped_first.any() and 0 < clipped.mean() < 1
    assert seen.metrics["loss"] == pytest.approx(sum(losses) / passes, rel=1e-3, abs=1e-6)
    assert seen.metrics["clip_frac"] == pytest.approx(clipped.mean(), rel=1e-6)
    if reference:
        assert sum(kls[:first]) < 1e-6 < 1e-3 < sum(kls)
        assert seen.metrics["kl"] == pytest.approx(sum(kls) / passes, rel=1e-3)


# ==== 12. The program as a user runs it ===========================================================
# What the commands do and leave behind; their mistakes cost one line and exit status 2.

PROGRAM = Path(grpo.__file__)


def call(*flags):
    """grpo.main in this process; afterwards Ctrl-C is pytest's again."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        return grpo.main([str(flag) for flag in flags])
    finally:
        signal.signal(signal.SIGINT, handler)


def run(*arguments, cwd, expect=0):
    """Python with these arguments on one thread, as from a shell; -> (stdout, stderr)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parent)}
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, env=environment,
                          capture_output=True, text=True, timeout=200)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout, done.stderr


def refused(capsys, *flags):
    """The one line that these flags cost; their exit status must be 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        call(*flags)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and "Traceback" not in error, error
    return error


def lines_of(out, name):
    return [json.loads(line) for line in (Path(out) / name).open()]


def metrics_of(out):
    return lines_of(out, "metrics.jsonl")


def without_times(metrics):
    return [{k: v for k, v in row.items() if "second" not in k and k != "tokens_per_s"}
            for row in metrics]


def same_weights(a, b):
    a, b = (transformers.AutoModelForCausalLM.from_pretrained(x).state_dict() for x in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def same_run(a, b):
    """Bit for bit the same weights, samples, and metrics but for times."""
    return (same_weights(a / "checkpoint", b / "checkpoint")
            and (a / "samples.jsonl").read_bytes() == (b / "samples.jsonl").read_bytes()
            and without_times(metrics_of(a)) == without_times(metrics_of(b)))


def save_small(folder, name="Qwen3", dtype=torch.float32, tokenizer=None, **config):
    """Write such a model and tokenizer; -> the folder, for --model."""
    small_model(name, **config).to(dtype).save_pretrained(folder)
    (tokenizer or bos_tokenizer()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A model whose step takes some 10 ms, for tests of the loop."""
    return save_small(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture
def made(small, monkeypatch):
    """Flags of a run on it with signal in every group: two of five prompts a step."""
    task = rewards.Task([{"prompt": f"Say {i * str(i)}."} for i in range(5)], [ranked_reward])
    monkeypatch.setitem(rewards.TASKS, "made", task)
    return ["--task", "made", "--model", small, "--prompts-per-step", 2, "--group-size", 4,
            "--max-new-tokens", 6, "--lr", 1e-3]


@pytest.fixture(scope="session")
def default_run(tmp_path_factory):
    """The README's first command: its folder, its output, and the model after the warm start."""
    folder, output, train = tmp_path_factory.mktemp("default"), io.StringIO(), grpo.train

    def after_warm_start(args, task, model, tokenizer, *rest):
        model.save_pretrained(folder / "warm")
        tokenizer.save_pretrained(folder / "warm")
        train(args, task, model, tokenizer, *rest)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(grpo, "train", after_warm_start)
        assert call("--out", folder / "run") == 0
    return folder / "run", output.getvalue(), folder / "warm"


def test_the_default_run_raises_the_reward_and_says_so(default_run):
    out, stdout, _ = default_run
    metrics = metrics_of(out)
    assert [row["step"] for row in metrics] == list(range(1, 201))
    rewards_now = [row["reward"] for row in metrics]
    first, last = np.mean(rewards_now[:5]), np.mean(rewards_now[-20:])
    assert 0.3 < first < 1.5 and last > 2.5
    said = stdout.splitlines()
    assert said[0].startswith("model: tiny") and "--model DIRECTORY" in said[0]
    assert f"mean reward: first 5 steps {first:.2f}, last 20 {last:.2f}" in said
    steps = [int(line.split()[1]) for line in said if line.startswith("step ")]
    assert steps == [1, *range(10, 201, 10)]
    assert sum(line.startswith("    reward ") for line in said) == len(steps)


def test_the_default_run_leaves_its_flags_metrics_samples_and_checkpoint(default_run):
    out, _, _ = default_run
    config = json.loads((out / "config.json").read_text())
    wanted = {"model": "tiny", "lr": 5e-5, "surrogate": "reinforce", "inner_epochs": 1, "seed": 0,
              "group_size": 8, "prompts_per_step": 1, "max_new_tokens": 64, "temperature": 1.0,
              "top_p": 1.0, "kl_coef": 0.0, "steps": 200, "torch": torch.__version__}
    assert {key: config[key] for key in wanted} == wanted
    names = """step reward reward_std reward/tags advantage_std flat_groups loss kl grad_norm
        ratio_mean ratio_max clip_frac entropy length length_max truncated lr tokens_per_s seconds
        seconds_sample seconds_update think""".split()
    metrics, samples = metrics_of(out), lines_of(out, "samples.jsonl")
    assert all(set(names) == set(row) for row in metrics) and len(samples) == 1600
    for row, group in zip(metrics, [samples[i : i + 8] for i in range(0, 1600, 8)], strict=True):
        points = rewards.tags_reward([sample["completion"] for sample in group])
        assert [sample["reward"] for sample in group] == points
        assert {sample["step"] for sample in group} == {row["step"]}
        assert row["reward"] == np.mean(points)
        assert (row["loss"] is None) == (row["flat_groups"] == 1.0)  # the skipped steps
        assert row["ratio_mean"] in (None, 1.0) and row["clip_frac"] in (None, 0.0)
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    assert 400_000 < model.num_parameters() < 600_000


def test_the_seed_decides_everything_but_times_in_another_process_too(default_run, tmp_path):
    # Also from the saved warm start, which as a directory resolves to the same rate.
    out, _, warm = default_run
    stdout, _ = run(PROGRAM, "--model", warm, "--out", "again", "--steps", 12, cwd=tmp_path)
    default = without_times(metrics_of(out))
    assert without_times(metrics_of(tmp_path / "again")) == default[:12]
    assert "step 12 " in stdout  # the last is printed
    call("--model", warm, "--out", tmp_path / "other", "--steps", 1, "--seed", 1)
    assert without_times(metrics_of(tmp_path / "other")) != default[:1]


def test_clip_eps_10_raises_the_reward_and_the_ratio_leaves_1(default_run, tmp_path):
    call("--model", default_run[2], "--clip-eps", 10, "--steps", 80, "--out", tmp_path)
    metrics = metrics_of(tmp_path)
    assert np.mean([row["reward"] for row in metrics[:5]]) < 1.5
    assert np.mean([row["reward"] for row in metrics[-20:]]) > 2.3
    ratios = [row["ratio_mean"] for row in metrics if row["ratio_mean"] is not None]
    assert max(abs(ratio - 1) for ratio in ratios) > 0.01
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["surrogate"] == "sequence" and config["inner_epochs"] == 2


def test_steps_0_only_warm_starts_the_same_each_time_and_never_on_resuming(monkeypatch, tmp_path):
    for name, steps in ("a", 2), ("b", 2), ("cold", 0):
        monkeypatch.setattr(rewards.TASKS["format"], "warm_start_steps", steps)
        call("--steps", 0, "--out", tmp_path / name)
    a, b, cold = (tmp_path / name / "checkpoint" for name in ("a", "b", "cold"))
    monkeypatch.setattr(rewards.TASKS["format"], "warm_start_steps", 2)
    call("--resume", tmp_path / "a")
    assert same_weights(a, b) and not same_weights(a, cold)
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == ""


def test_help_explains_every_flag_and_shows_two_commands():
    parser = grpo.make_parser()
    assert all(action.help for action in parser._actions)
    assert {"task", "model", "run", "sampling", "loss"} <= {
        group.title for group in parser._action_groups if group._group_actions}
    text = parser.format_help()
    assert "python grpo.py  " in text and "python grpo.py --clip-eps 10" in text


@pytest.mark.parametrize("flag, value", [
    ("--group-size", "1"), ("--group-size", "x"), ("--temperature", "0"), ("--temperature", "-1"),
    ("--top-p", "0"), ("--top-p", "1.1"), ("--steps", "-1"), ("--max-new-tokens", "0"),
    ("--lr", "-1e-5"), ("--lr", "nan"), ("--lr", "inf"), ("--clip-eps", "-0.1"),
    ("--clip-eps", "nan"), ("--clip-eps", "1 2 3"), ("--kl-coef", "-0.1"), ("--kl-coef", "inf"),
    ("--clip-eps", "0.2 --surrogate reinforce"), ("--surrogate", "cispo"), ("--seed", "-1"),
    ("--inner-epochs", "0"), ("--micro-batch", "0"), ("--prompts-per-step", "0"),
    ("--task", "chess"), ("--surrogate", "ppo"), ("--surrogate", "kl"), ("--aggregate", "max"),
    ("--kl", "k4"), ("--advantage", "batch"), ("--save-every", "0"), ("--eval-every", "0"),
    ("--eval-every", "1"),  # nothing is held out
    ("--reward", ""), ("--reward", "nonsense"), ("--reward", "correct"),  # there are no answers
    ("--reward-weights", "1 2"), ("--reward-weights", "nan"), ("--data", "no/such/file"),
    ("--model", "tiny --task times"), ("--resume", "no/such/run"), ("--minibatches", "4"),
    ("--resume", "RUN --model OTHER"), ("--resume", "RUN --out OTHER")])
def test_a_flag_that_cannot_work_is_refused(flag, value, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grpo, "tiny_policy", None)  # before any model is loaded
    error = refused(capsys, flag, *value.split())
    assert ("no/such/file" if flag == "--data" else flag) in error
    assert not list(tmp_path.iterdir())


def test_a_refused_flag_from_the_shell_and_a_file_with_a_bad_line(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "p"}\n\n{oops\n')
    stdout, stderr = run(PROGRAM, "--data", "bad.jsonl", cwd=tmp_path, expect=2)
    assert stderr.count("\n") == 1 and "bad.jsonl, line 3:" in stderr and not stdout
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_devices_folders_and_models_that_are_not_there_cost_one_line(
    made, capsys, monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("")
    out = tmp_path / "out"
    for flags, named in (["--device", "nonsense", "--out", out], "--device nonsense"), (
            ["--out", tmp_path / "file"], "--out"), (
            ["--model", tmp_path, "--out", out], "--model tiny"), (
            ["--model", "no/such/directory", "--out", out], "--model no/such/directory"):
        if "no/such/directory" in flags:  # as without a network
            offline = OSError("We couldn't connect to the hub.\nMore.")
            from_pretrained = mock.Mock(side_effect=offline)
            monkeypatch.setattr(grpo.AutoModelForCausalLM, "from_pretrained", from_pretrained)
        error = refused(capsys, *made, *flags)
        assert named in error and not out.exists()
    assert "--model tiny" in error and "--model DIRECTORY" in error


def test_data_and_rewards_chosen_by_name_reach_the_samples_and_no_prompt_twice_in_a_round(
    made, monkeypatch, capsys, tmp_path
):
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"prompt": p, "answer": ord(p)}) + "\n" for p in "abcde"))
    def answer_reward(completions, answer, completion_ids):  # gets the columns that it names
        for text, ids in zip(completions, completion_ids, strict=True):  # up to the first EOS
            assert len(ids) == 6 or ids[-1] == EOS
            assert bos_tokenizer().decode([i for i in ids if i != EOS]) == text
        return [number + i % 4 for i, number in enumerate(answer)]
    monkeypatch.setitem(rewards.REWARDS, "answer", answer_reward)
    call(*made, "--data", data, "--reward", "tags", "answer", "--reward-weights", 2, 0.5,
         "--steps", 5, "--out", tmp_path)  # two rounds: 5 steps of 2 of 5 prompts
    samples = lines_of(tmp_path, "samples.jsonl")
    for i, sample in enumerate(samples):
        assert sample["rewards"] == [0, ord(sample["prompt"]) + i % 4]
        assert sample["reward"] == 0.5 * sample["rewards"][1]
    prompts = [sample["prompt"] for sample in samples[::4]]
    assert sorted(prompts[:5]) == sorted(prompts[5:]) == list("abcde")
    assert "first prompt: '<bos>a'\n" in capsys.readouterr().out


def test_ctrl_c_finishes_the_step_saves_and_before_training_leaves_no_run(
    made, monkeypatch, tmp_path
):
    def interrupted(*_, **__):
        os.kill(os.getpid(), signal.SIGINT)
        return ranked_reward("12345678")
    monkeypatch.setattr(grpo, "warm_start", interrupted)
    with pytest.raises(SystemExit) as stopped:
        call("--out", tmp_path)
    assert stopped.value.code == 130
    rewards.TASKS["made"].rewards = [interrupted]
    assert call(*made, "--steps", 9, "--out", tmp_path) == 130  # in the same folder
    rewards.TASKS["made"].rewards = [ranked_reward]
    assert call("--resume", tmp_path, "--steps", 3) == 0
    assert [row["step"] for row in lines_of(tmp_path, "samples.jsonl")][::8] == [1, 2, 3]


def test_the_readme_example_of_another_task_runs(small, tmp_path):
    readme = (PROGRAM.parent / "README.md").read_text()
    code = re.search(r"```python\n(# brief\.py\n.*?)```", readme, re.S).group(1)
    (tmp_path / "brief.py").write_text(code)
    run("brief.py", "--task", "brief", "--model", small, "--steps", 2, "--out", "run", cwd=tmp_path)
    assert "reward/brief" in metrics_of(tmp_path / "run")[-1]


def with_hunks(source, diff):
    """The source with a README diff applied; each of its places must be there once."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        old = "\n".join(line[1:] for line in lines if line[0] in " -")
        new = "\n".join(line[1:] for line in lines if line[0] in " +")
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


HACKS = {  # what begins the first line that a diff adds, and flags beside those of every run
    "        optimizer.param": [], "    from peft": [], '         "dual"': [
        "--surrogate", "dual", "--clip-eps", 0.2, "--inner-epochs", 2],
    "    rows": [], "    nucleus": ["--top-p", 0.9, "--kl-coef", 0.1, "--kl", "k1"]}


@pytest.mark.parametrize("begins", HACKS)
def test_the_readmes_hacks_apply_and_run(begins, small, tmp_path):
    if "peft" in begins:
        pytest.importorskip("peft")
    readme = (PROGRAM.parent / "README.md").read_text()
    (diff,) = (d for d in re.findall(r"```diff\n(.*?)```", readme, re.S)
               if re.search(r"^\+(.*)", d, re.M)[1].startswith(begins))
    (tmp_path / "grpo.py").write_text(with_hunks(PROGRAM.read_text(), diff))
    shutil.copy(PROGRAM.with_name("rewards.py"), tmp_path)
    flags = ["--task", "arithmetic", "--model", small, "--reward", "coin", "--steps", 2,
             "--max-new-tokens", 6, "--out", "run", *HACKS[begins]]
    done = subprocess.run(
        [sys.executable, "grpo.py", *map(str, flags)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(metrics_of(tmp_path / "run")) == 2


# ==== 13. Models and prompts =====================================================================
# A model is trained as it was saved, or refused; a prompt reaches it as it was trained to read it.

TEMPLATE = ("{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
            "{% if enable_thinking %}<on>{% else %}<off>{% endif %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}")


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "Bert"])
def test_a_trained_step_survives_saving_in_every_architecture(name, made, monkeypatch, tmp_path):
    trained, train = [], grpo.train
    def kept(args, task, model, *rest):
        trained.append(model)
        train(args, task, model, *rest)
    monkeypatch.setattr(grpo, "train", kept)
    rewards.TASKS["made"].train[:] = [{"prompt": "Say."}, {"prompt": "Say it all."}]  # padded
    source = save_small(tmp_path / "m", name, torch.bfloat16, bos_tokenizer(TEMPLATE))
    call(*made, "--model", source, "--steps", 1, "--lr", 1e-6, "--out", tmp_path, "--kl-coef", 0.1)
    (row,) = metrics_of(tmp_path)
    assert abs(row["kl"]) < 1e-6  # of two passes: dropout in GPT2 does not act
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").eval()
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():  # the same logits as the trained model's, which is still in memory
        assert torch.equal(model(ids).logits, trained[0].eval()(ids).logits)
    # Adam's first step moves every weight that has a gradient by lr: float32 keeps that, whatever
    # the source's type, and in bf16 (an ulp of 1e-4 at 0.05) nearly all of it would be lost.
    stored = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.float32}
    before = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    before, after = (m.get_output_embeddings().weight.detach() for m in (before, model))
    moved = (after - before).abs()
    assert (moved > 5e-7).double().mean() > 0.9 and moved.max() < 2e-6
    # Tied embeddings are one tensor still, and stored once; no row was added for padding.
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (name not in ("Llama", "Mixtral")) == ("lm_head.weight" not in stored)
    assert after.shape[0] == model.config.vocab_size == 259
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    assert tokenizer.chat_template == TEMPLATE and tokenizer.pad_token is None
    assert tokenizer("a <bos>é\n").input_ids == bos_tokenizer()("a <bos>é\n").input_ids


@pytest.mark.parametrize("pad, own", [
    ("<eos>", {}), ("<pad>", {}), ("<new>", {}),  # this one has no row in the embedding
    (None, {"do_sample": True, "top_k": 1, "top_p": 0.1, "temperature": 0.1, "min_new_tokens": 9,
            "repetition_penalty": 9.0, "suppress_tokens": list(range(200)), "max_length": 3,
            "forced_eos_token_id": 250}),
    (None, {"do_sample": False, "temperature": 0.6, "top_k": 20})])  # cannot be saved as it is
def test_the_models_pad_token_and_generation_config_act_on_nothing_and_are_saved_as_they_were(
    pad, own, made, tmp_path
):
    for name, token, config in ("run", pad, own), ("wanted", None, {}):
        tokenizer, config = bos_tokenizer(), {**config, "eos_token_id": [EOS, 7]}
        tokenizer.add_special_tokens({"pad_token": token} if token else {})
        source = save_small(tmp_path / f"{name} model", tokenizer=tokenizer)
        (source / "generation_config.json").write_text(json.dumps(config))
        call(*made, "--model", source, "--steps", 2, "--out", tmp_path / name)
        checkpoint = tmp_path / name / "checkpoint"
        saved = json.loads((checkpoint / "generation_config.json").read_text())
        assert config.items() <= saved.items()
        assert transformers.AutoTokenizer.from_pretrained(checkpoint).pad_token == token
    assert same_run(tmp_path / "run", tmp_path / "wanted")


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say."}]
HALF = [{"role": "user", "content": "Say."}, {"role": "assistant", "content": "Hm. <think>"}]


@pytest.mark.parametrize("adds", ["<bos> $A", "<bos> $A <eos>", "$A <eos>"])
@pytest.mark.parametrize("template, prompt, flag, text", [
    (None, "Say.", None, "Say."), (None, "<bos>Say.", None, "Say."),
    (TEMPLATE, "Say.", None, "[user]Say.<off>[assistant]"),
    (TEMPLATE, "Say.", "--no-chat-template", "Say."),
    (TEMPLATE, MESSAGES, None, "[system]Be brief.[user]Say.<off>[assistant]"),
    (TEMPLATE, MESSAGES, "--no-chat-template", "Be brief.\nSay."),
    (TEMPLATE, HALF, None, "[user]Say.[assistant]Hm. <think>"),  # continued
    (None, MESSAGES, None, "Be brief.\nSay.")])
def test_a_prompt_has_one_bos_at_most_and_no_eos(template, prompt, flag, text, adds):
    args = SimpleNamespace(no_chat_template=flag is not None)
    ids = grpo.encode_prompt(bos_tokenizer(template, adds), prompt, args)
    bos = [BOS] if "<bos>" in adds or "<bos>" in prompt or text[0] == "[" else []
    assert ids == bos + bos_tokenizer(adds="$A")(text).input_ids and EOS not in ids


@pytest.mark.parametrize("kind", ["training", "held-out"])
@pytest.mark.parametrize("prompt, said", [
    ("x" * 58, None), ("x" * 59, "59 tokens and --max-new-tokens 6"), ("", "0 tokens"),
    ("<new>", "no row for token 259: resize_token_embeddings"),
    ([{"role": "system", "content": "?"}], "no system role")])  # as Gemma's
def test_a_prompt_that_cannot_be_used_is_refused_by_its_row(
    kind, prompt, said, made, tmp_path, capsys
):
    # 64 positions less 6 new tokens: 58 bytes fit. With learned positions 59 would crash or be cut.
    task, examples = rewards.TASKS["made"], [{"prompt": "p", "answer": "a"}] * 2
    task.train[:], task.test[:] = examples, examples
    (task.train if kind == "training" else task.test)[1] = {"prompt": prompt, "answer": "a"}
    tokenizer = bos_tokenizer(adds="$A", template=(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ messages[0].content }}"))
    tokenizer.add_tokens(["<new>"])
    source = save_small(tmp_path / "m", "GPT2", tokenizer=tokenizer)
    flags = [*made, "--model", source, "--steps", 1, "--eval-every", 1, "--out", tmp_path / "out"]
    if said is None:
        assert call(*flags) == 0
    else:
        error = refused(capsys, *flags)
        assert f"{kind} example 2: " in error and said in error
        assert not (tmp_path / "out").exists()


def weights(change):
    """A damage to the model's file."""
    def damage(folder):
        changed = change(load_file(folder / "model.safetensors"))
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return damage


def config(name, value):
    def damage(folder):
        old = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**old, name: value}))
    return damage


def keep(*names):
    return lambda folder: [p.unlink() for p in folder.iterdir() if p.name not in names]


@pytest.mark.parametrize("name, damage, said", [
    ("Qwen3", keep(), ""), ("Qwen3", keep("config.json"), ""),
    ("Qwen3", config("model_type", "t5"), ""), ("Qwen3", config("vocab_size", 300), ""),
    ("Qwen3", lambda folder: (folder / "config.json").write_text("{oops"), ""),
    ("Qwen3", lambda folder: (folder / "tokenizer.json").write_text("{}"), ""),
    ("Qwen3", lambda folder: os.truncate(folder / "model.safetensors", 5000), ""),
    # Without a tokenizer some models get one of special tokens alone.
    ("Qwen3", keep("config.json", "model.safetensors"), "tokenizer"),
    ("GPT2", keep("config.json", "model.safetensors"), "tokenizer"),
    # What was saved after torch.compile: a layer has 9 weights, and there are 3 others.
    ("Llama", weights(lambda w: {f"_orig_mod.{k}": v for k, v in w.items()}),
     " 12 weights are not in the file and would be random: lm_head.weight, "),
    ("Llama", weights(lambda w: {k: w[k] for k in w if k != "lm_head.weight"}),
     " 1 weights are not in the file and would be random: lm_head.weight, "),
    ("Llama", config("num_hidden_layers", 2), " 9 weights are not in the file and would be random: "
     "model.layers.1.input_layernorm.weight, ")])
def test_a_folder_that_holds_no_whole_model_costs_one_line(name, damage, said, tmp_path, capsys):
    source = save_small(tmp_path / "m", name)
    damage(source)
    error = refused(capsys, "--model", source, "--out", tmp_path / "out")
    assert f"--model {source}" in error and said in error and len(error) < 600
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_used_are_said_once(made, tmp_path, capsys):
    source = save_small(tmp_path / "m", "Llama", num_hidden_layers=2)
    config("num_hidden_layers", 1)(source)
    call(*made, "--model", source, "--steps", 1, "--out", tmp_path)
    said = capsys.readouterr().out
    assert said.count("are not used") == 1
    assert "9 weights in the file are not used: model.layers.1.input_layernorm.weight" in said


@pytest.mark.parametrize(
    "fault", ["none", "cache", "positions", "padding", "signature", "bidirectional"])
def test_a_model_whose_sampler_is_not_the_scored_network_is_refused(
    fault, made, monkeypatch, capsys, tmp_path
):
    source = save_small(tmp_path / "m", "Bert" if fault == "bidirectional" else "GPT2")
    forward = transformers.GPT2LMHeadModel.forward
    def faulty(self, **settings):
        if fault == "cache" and settings["input_ids"].shape[1] == 1:
            settings["position_ids"] = settings["position_ids"] + 1
        if fault == "padding":  # is attended to
            settings["attention_mask"] = None
        if fault == "positions":  # are counted from the padding on
            settings["position_ids"] = None
        return forward(self, **settings)
    if fault != "signature":  # by which `generate` knows what the model takes
        faulty = functools.wraps(forward)(faulty)
    monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", faulty)
    flags = [*made, "--model", source, "--steps", 1, "--out", tmp_path / "out"]
    if fault == "none":
        assert call(*flags) == 0
    else:
        error = refused(capsys, *flags)
        assert re.search(r" [\d.e+]+ nats apart", error) and str(source) in error
        assert not (tmp_path / "out").exists()


def test_the_check_of_the_sampler_changes_no_run(made, monkeypatch, tmp_path):
    call(*made, "--steps", 2, "--out", tmp_path / "with")
    monkeypatch.setattr(grpo, "check_sampler", lambda *_: None)
    call(*made, "--steps", 2, "--out", tmp_path / "without")
    assert same_run(tmp_path / "with", tmp_path / "without")


# ---- Evaluation and warnings =================================================================
# What a run says of itself beside its metrics.


def test_eval_every_measures_greedy_texts_and_changes_no_training_sample(made, tmp_path):
    task, seen = rewards.TASKS["made"], []
    task.test[:] = [{"prompt": p, "answer": p} for p in ("a", "bcd", "ef")]
    def first_reward(completions, answer):
        seen.append((completions, answer))
        return [1.0, 0.0, 0.0]
    task.evaluate = first_reward
    call(*made, "--steps", 5, "--eval-every", 2, "--out", tmp_path / "with")
    call(*made, "--steps", 5, "--out", tmp_path / "without")
    rows = metrics_of(tmp_path / "with")
    found = {row["step"]: row.pop("eval_accuracy") for row in rows if "eval_accuracy" in row}
    assert found == {step: pytest.approx(1 / 3) for step in (0, 2, 4, 5)}
    (tmp_path / "with" / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows[1:]))
    assert same_run(tmp_path / "with", tmp_path / "without")
    # Before training the texts are the source's greedy ones, each generated alone.
    model, tokenizer = small_model(), bos_tokenizer()
    for text, prompt in zip(*seen[0], strict=True):
        ids = tokenizer(prompt, return_tensors="pt")
        greedy = model.generate(**ids, do_sample=False, max_new_tokens=6, pad_token_id=PAD)[0, -6:]
        assert text == tokenizer.decode(greedy).partition("<eos>")[0]


def warnings_of(capsys, word):
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith("warning") and word in line]


@pytest.mark.parametrize("steps, graded, wanted", [(9, 0, 0), (10, 0, 1), (25, 0, 3), (18, 9, 0)])
def test_ten_flat_steps_in_a_row_are_warned_of(steps, graded, wanted, made, capsys, tmp_path):
    turns = []
    def flat_reward(completions, **columns):
        turns.append(1)
        return [float(row and len(turns) == graded) for row, _ in enumerate(completions)]
    rewards.TASKS["made"].rewards = [flat_reward]
    call(*made, "--steps", steps, "--out", tmp_path)
    found = warnings_of(capsys, "nothing to compare")  # in steps 10, 20 and the last
    assert len(found) == wanted
    assert all("--temperature" in line and "--reward" in line for line in found)


@pytest.mark.parametrize("cut, wanted", [(4, 0), (5, 4)])
def test_more_than_half_truncated_is_warned_of(cut, wanted, made, monkeypatch, capsys, tmp_path):
    sample = grpo.sample
    def shortened(*args, **settings):
        rollout = sample(*args, **settings)
        rollout.truncated = torch.arange(8) < cut
        return rollout
    monkeypatch.setattr(grpo, "sample", shortened)
    call(*made, "--steps", 22, "--out", tmp_path)
    assert len(warnings_of(capsys, "--max-new-tokens")) == wanted  # in steps 1, 10, 20 and 22
    assert [row["truncated"] for row in metrics_of(tmp_path)] == [cut / 8] * 22


# ==== 14. Nothing lost ===========================================================================
# A run that was stopped, killed or spoiled goes on from its last whole checkpoint, bit for bit.


@pytest.mark.parametrize("flags", [
    [], ["--kl-coef", 0.1, "--clip-eps", 0.2, "--inner-epochs", 3],
    ["--kl-coef", 0.5, "--seed", 7, "--eval-every", 2, "--advantage", "none"]], ids=str)
def test_two_steps_resumed_for_two_more_are_four_steps_bit_for_bit(flags, made, tmp_path):
    task = rewards.TASKS["made"]
    task.rewards, task.test = [rewards.coin_reward], [{"prompt": "p", "answer": "a"}]
    call(*made, *flags, "--steps", 4, "--out", tmp_path / "four")
    call(*made, *flags, "--steps", 2, "--out", tmp_path / "two")
    assert not same_weights(tmp_path / "four" / "checkpoint", tmp_path / "two" / "checkpoint")
    torch.manual_seed(99)  # another process has other states
    random.seed(99)
    call("--resume", tmp_path / "two", "--steps", 4)  # every other flag is in config.json
    assert same_run(tmp_path / "four", tmp_path / "two")
    for steps in [], ["--steps", 1]:  # a finished run has nothing more to do
        call("--resume", tmp_path / "two", *steps)
        assert same_run(tmp_path / "four", tmp_path / "two")
    tossed = [sample["reward"] for sample in lines_of(tmp_path / "two", "samples.jsonl")]
    assert len({tuple(tossed[i:i + 8]) for i in range(0, 32, 8)}) == 4  # anew in each step
    assert torch.load(tmp_path / "two" / "checkpoint" / "trainer.pt")["step"] == 4


def test_flags_given_on_resuming_act(made, tmp_path):
    call(*made, "--steps", 2, "--out", tmp_path)
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "before")
    call("--resume", tmp_path, "--steps", 3, "--lr", 0)
    assert metrics_of(tmp_path)[2]["lr"] == 0
    assert same_weights(tmp_path / "before", tmp_path / "checkpoint")
    call("--resume", tmp_path, "--steps", 5, "--lr", 1e-3, "--kl-coef", 0.1)
    call("--resume", tmp_path, "--steps", 6)  # the reference is kept from then on
    kls = [row["kl"] for row in metrics_of(tmp_path)]
    assert kls[:3] == [None] * 3
    assert kls[3] == pytest.approx(0, abs=1e-6)  # at first it is the policy as resumed
    assert 1e-5 < kls[4] < kls[5]


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the program catches it."""


def half_model(model, path, **_):
    Path(path).mkdir(exist_ok=True)
    Path(path, "model.safetensors").write_bytes(b"\x10\0\0\0")


OPERATIONS = [  # of a save, and how far each comes before the kill
    (transformers.PreTrainedModel, "save_pretrained", half_model),
    (transformers.PreTrainedTokenizerBase, "save_pretrained", lambda *_, **__: None),
    (torch, "save", lambda state, path: Path(path).write_bytes(b"PK\3\4")),
    (Path, "rename", lambda *_: None),
    (shutil, "rmtree", lambda path, **_: [p.unlink() for p in sorted(Path(path).glob("*"))[:2]])]


@pytest.mark.parametrize("moment", range(7))  # three writes, rmtree, two renames, rmtree
def test_killed_in_any_file_operation_of_a_save_a_run_resumes(moment, made, monkeypatch, tmp_path):
    call(*made, "--steps", 4, "--out", tmp_path / "four")
    run, count = tmp_path / "run", itertools.count()

    def interrupted(real, half):
        def operation(*args, **settings):
            if len(metrics_of(run)) == 3 and next(count) == moment:  # in the save after step 3
                half(*args, **settings)
                raise Killed
            return real(*args, **settings)
        return operation

    with monkeypatch.context() as patch:
        for owner, name, half in OPERATIONS:
            patch.setattr(owner, name, interrupted(getattr(owner, name), half))
        with pytest.raises(Killed):
            call(*made, "--steps", 4, "--save-every", 1, "--out", run)
    whole = run / ("checkpoint" if (run / "checkpoint").exists() else "checkpoint.old")
    assert torch.load(whole / "trainer.pt")["step"] == 2 + (moment == 6)
    for name in "metrics.jsonl", "samples.jsonl":  # it may also have died while it wrote a line
        with (run / name).open("a") as file:
            file.write('{"step": 4}\n{"step": 5, "rew'[:9 * moment])
    call("--resume", run)
    assert same_run(tmp_path / "four", run)
    assert {path.name for path in run.iterdir()} == {
        "config.json", "metrics.jsonl", "samples.jsonl", "checkpoint"}


def test_a_kill_while_config_json_is_written_leaves_the_run_resumable(made, monkeypatch, tmp_path):
    call(*made, "--steps", 2, "--out", tmp_path)
    write_text = Path.write_text
    def killed(path, text, *rest):
        write_text(path, text[:len(text) // 2], *rest)
        raise Killed
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", killed)
        with pytest.raises(Killed):
            call("--resume", tmp_path, "--steps", 3)
    call("--resume", tmp_path, "--steps", 3)
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("name, content", [
    ("config.json", None), ("config.json", b"{oops"), ("config.json", b"[]"),
    ("config.json", b"\xff\xfe"), ("config.json", b'{"task": "gone"}'), ("checkpoint", None),
    ("checkpoint/trainer.pt", None), ("checkpoint/trainer.pt", b"junk"),
    ("checkpoint/model.safetensors", None), ("checkpoint/model.safetensors", b"junk")])
def test_a_damaged_run_is_refused_with_one_line(name, content, made, tmp_path, capsys):
    call(*made, "--steps", 1, "--out", tmp_path)
    (tmp_path / name).rename(tmp_path / "away")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    error = refused(capsys, "--resume", tmp_path, "--steps", 2)
    assert f"--resume {tmp_path}:" in error


def once(step, function, failure):
    """A function that fails in one step of all."""
    turns = itertools.count(1)
    def called(*args, **settings):
        return (failure if next(turns) == step else function)(*args, **settings)
    called.__name__ = function.__name__
    return called


def bug(**columns):
    return columns["no such column"]


def not_finite(logps, *_, **__):
    return logps.sum() * math.inf, {"ratios": torch.ones(1), "clipped": torch.zeros(1)}


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("failure, said", [
    (bug, None), (lambda **_: [1.0] * 7, "reward ranked: 7 values for 8 completions"),
    (not_finite, r"loss -inf, gradient norm nan.*")])
def test_a_step_that_fails_costs_itself_and_none_before_it(
    failure, said, step, made, monkeypatch, tmp_path
):
    task, out = rewards.TASKS["made"], tmp_path / "run"
    if failure is not_finite:
        made += ["--inner-epochs", 2]  # the second fails, after the first moved the weights
        monkeypatch.setattr(grpo, "policy_loss", once(2 * step, grpo.policy_loss, failure))
    else:
        task.rewards = [once(step, ranked_reward, failure)]
    with pytest.raises(SystemExit if said else rewards.RewardError) as stopped:
        call(*made, "--steps", 4, "--save-every", 1, "--out", out)
    if said:  # a string: Python prints it and exits with 1
        assert re.fullmatch(f"grpo.py: step {step}: {said}", stopped.value.code)
    else:  # a bug keeps its traceback
        assert isinstance(stopped.value.__cause__, KeyError)
    call(*made, "--steps", 4, "--out", tmp_path / "four")
    if step == 1:  # a folder in which no step was made does not hold a run
        call(*made, "--steps", 4, "--out", out)
    else:
        assert torch.load(out / "checkpoint" / "trainer.pt")["step"] == 2
        call("--resume", out)
    assert same_run(tmp_path / "four", out)
