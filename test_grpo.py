# SPDX-License-Identifier: MIT
"""python -m pytest: every number that the two books print, the mathematics, the program.

Expected values are printed by a source named beside them, or computed here in numpy from the
definitions, never by the code under test.
"""

import inspect
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

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import grpo
import rewards
from rewards import (
    correct_reward,
    correct_think_reward,
    extract_answer,
    parse_number,
    read_jsonl,
    text_of,
    think_reward,
)

torch.set_num_threads(1)

SURROGATES = ("reinforce", "sequence", "token", "gspo", "cispo")
PER_COMPLETION = ("sequence", "gspo")
AGGREGATES = ("sum", "mean", "token", "constant")
ESTIMATORS = ("k1", "k2", "k3", "weighted")
MAX_LEN = 9  # for the "constant" aggregation


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


def numeric_gradient(function, x, h=1e-6):
    """Central differences."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[index] = h
        gradient[index] = (function(x + step) - function(x - step)) / (2 * h)
    return gradient


# ---- What the two books print -------------------------------------------------------------------

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


# ---- The loss and its gradient ------------------------------------------------------------------


def off_policy(B=6, T=6, seed=0):
    """logps, old, ref, advantages, weights (float64 numpy) and a ragged mask.

    With eps 0.2, 0.28 rows 0 and 3 hold clipped terms for every surrogate, on either side.
    """
    rng = np.random.default_rng(seed)
    logps = rng.normal(-2, 0.5, (B, T))
    drift = np.array([0.6, -0.6, 0.6, -0.6, 0.05, -0.05])[:B, None]
    old = logps - drift - rng.normal(0, 0.1, (B, T))
    ref = logps + rng.normal(0, 0.5, (B, T))
    A = np.array([1.3, 0.4, -0.9, -1.6, 0.8, -0.2])[:B]
    mask = np.arange(T) < np.array([6, 4, 1, 5, 3, 2])[:B, None]
    return logps, old, ref, A, mask, rng.uniform(0.2, 2, (B, T))


def shares(mask, aggregate):
    """What a token's term is multiplied by in the aggregated loss."""
    B, lengths = len(mask), mask.sum(1, keepdims=True)
    return mask * {"sum": 1 / B, "mean": 1 / np.maximum(lengths, 1) / B, "token": 1 / mask.sum(),
                   "constant": 1 / (B * MAX_LEN)}[aggregate]


def ppo_term(r, A, low, high):
    """(term, whether the clip removed its gradient), case by case."""
    if A > 0 and r > high:
        return -high * A, True
    if A < 0 and r < low:
        return -low * A, True
    return -r * A, False


def by_definition(logps, old, A, mask, surrogate, clip, aggregate, weights, frozen=None):
    """(loss, [(ratio, clipped), ...]), term by term. frozen: logps where no gradient flows."""
    lo, hi = clip
    hi = lo if hi is None else hi
    low, high = -math.inf if lo is None else 1 - lo, math.inf if hi is None else 1 + hi
    frozen, share = logps if frozen is None else frozen, shares(mask, aggregate)
    loss, seen = 0.0, []
    for i, on in enumerate(mask):
        log_ratio = (logps - old)[i, on]
        if surrogate in PER_COMPLETION:
            r = np.exp(log_ratio.sum() if surrogate == "sequence" else log_ratio.mean())
            term, clipped = ppo_term(r, A[i], low, high)
            loss += term * weights[i, on].mean() / len(mask)
            seen.append((r, clipped))
        elif surrogate == "reinforce":  # no ratio of its own: the sequence's is reported
            loss -= A[i] * (logps * weights * share)[i, on].sum()
            seen.append((np.exp(log_ratio.sum()), False))
        else:
            for t in np.flatnonzero(on):
                if surrogate == "cispo":
                    r = np.exp(frozen[i, t] - old[i, t])
                    term, clipped = -min(r, high) * A[i] * logps[i, t], r > high
                else:
                    r = np.exp(logps[i, t] - old[i, t])
                    term, clipped = ppo_term(r, A[i], low, high)
                loss += term * weights[i, t] * share[i, t]
                seen.append((r, clipped))
    return loss, seen


SURROGATE_AND_CLIP = [  # nothing clipped, one eps, two, the upper alone; cispo needs a cap
    (surrogate, clip) for surrogate in SURROGATES
    for clip in ((None, None), (0.2, None), (0.2, 0.28), (None, 0.28))
    if surrogate != "cispo" or clip != (None, None)]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("surrogate, clip", SURROGATE_AND_CLIP)
def test_policy_loss_gradient_and_statistics_are_those_of_the_definition(
        surrogate, clip, aggregate, weighted):
    logps, old, _, A, mask, weights = off_policy()
    weights = weights if weighted else np.ones_like(weights)
    settings = (old, A, mask, surrogate, clip, aggregate, weights)
    expected, seen = by_definition(logps, *settings)
    slope = numeric_gradient(lambda x: by_definition(x, *settings, frozen=logps)[0], logps)
    ratios, clipped = map(np.array, zip(*seen))

    loss, gradient, stats = policy(
        logps, *map(torch.tensor, (old, A, mask)), surrogate, *clip, aggregate, MAX_LEN,
        torch.tensor(weights) if weighted else None)
    assert loss == pytest.approx(expected, rel=1e-9)
    assert gradient == pytest.approx(slope, rel=1e-6, abs=1e-8)
    assert stats["clip_frac"] == pytest.approx(clipped.mean(), rel=1e-6)
    assert stats["ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-6)
    assert stats["ratio_max"] == pytest.approx(ratios.max(), rel=1e-6)
    if clip[0] and surrogate in ("sequence", "token", "gspo"):  # both bounds were at work
        assert 0 < clipped[ratios > 1].mean() < 1 and 0 < clipped[ratios < 1].mean() < 1


def test_the_aggregations_and_surrogates_differ_on_the_vectors_that_test_them():
    logps, old, _, A, mask, weights = off_policy()
    losses = {(s, a): by_definition(logps, old, A, mask, s, (0.2, 0.28), a, weights)[0]
              for s in SURROGATES for a in (AGGREGATES if s not in PER_COMPLETION else ["sum"])}
    assert len({round(loss, 6) for loss in losses.values()}) == len(losses) == 14


OFF_POLICY_D = 0.3  # drops row 3 of off_policy(): A < 0, mean(old - l) about 0.6
SURROGATE_AND_AGGREGATE = [
    (surrogate, aggregate) for surrogate in SURROGATES
    for aggregate in (["sum"] if surrogate in PER_COMPLETION else AGGREGATES)]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("D", [-0.3, OFF_POLICY_D, 2.0])
@pytest.mark.parametrize("surrogate, aggregate", SURROGATE_AND_AGGREGATE)
def test_off_policy_mask_takes_the_loss_of_bad_rows_that_drifted_down_and_counts_them(
        surrogate, aggregate, D, weighted):
    logps, old, _, A, mask, weights = off_policy()
    weights = weights if weighted else np.ones_like(weights)
    drift = ((old - logps) * mask).sum(1) / mask.sum(1)
    dropped = (A < 0) & (drift > D)  # DeepSeek-V3.2's M = 0
    assert dropped.sum() == {-0.3: 2, OFF_POLICY_D: 1, 2.0: 0}[D]
    assert ((A < 0) & ~dropped).any() and ((A > 0) & (drift > OFF_POLICY_D)).any()
    # No lower bound, or the clip alone would take the gradient of the row that is dropped.
    clip = (None, 0.28)
    settings = (old, np.where(dropped, 0, A), mask, surrogate, clip, aggregate, weights)
    expected, _ = by_definition(logps, *settings)  # a row without advantage has no loss, too
    slope = numeric_gradient(lambda x: by_definition(x, *settings, frozen=logps)[0], logps)
    _, seen = by_definition(logps, old, A, *settings[2:])
    ratios, clipped = map(np.array, zip(*seen))  # with the dropped rows

    loss, gradient, stats = policy(
        logps, *map(torch.tensor, (old, A, mask)), surrogate, *clip, aggregate, MAX_LEN,
        torch.tensor(weights) if weighted else None, off_policy_mask=D)
    assert loss == pytest.approx(expected, rel=1e-9)
    assert gradient == pytest.approx(slope, rel=1e-6, abs=1e-8)
    assert (gradient[dropped] == 0).all()
    assert (gradient[~dropped][mask[~dropped]] != 0).any(0).all()
    assert stats["clip_frac"] == pytest.approx(clipped.mean(), rel=1e-6)
    assert stats["ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-6)
    assert stats["ratio_max"] == pytest.approx(ratios.max(), rel=1e-6)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_off_policy_mask_averages_over_a_rows_own_tokens_and_keeps_one_at_exactly_D(surrogate):
    # Drifts of exactly 0.5 (on 1.0 and 0.0), and past the last token of anything.
    old = torch.tensor([[-1.0, -1, -1], [-1, -1, -1], [-1, -1, -1]], dtype=torch.float64)
    down = torch.tensor([[1.0, 0, 900], [0.5, 900, -900], [0.5, 0.5, 0.5]], dtype=torch.float64)
    mask = torch.arange(3) < torch.tensor([[2], [1], [3]])
    for D, stays in (0.5, True), (math.nextafter(0.5, 0), False):
        A = torch.tensor([-1.0, -1, -1], dtype=torch.float64)
        settings = (surrogate, None, 4.0)  # cispo needs a cap
        _, gradient, _ = policy(old - down, old, A, mask, *settings, off_policy_mask=D)
        assert ((gradient != 0) == (mask.numpy() & stays)).all()
        _, gradient, _ = policy(old - down, old, -A, mask, *settings, off_policy_mask=D)
        assert ((gradient != 0) == mask.numpy()).all()  # a good row stays wherever it is


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("surrogate, aggregate", SURROGATE_AND_AGGREGATE)
def test_masked_junk_has_no_effect_on_the_off_policy_mask(surrogate, aggregate, junk):
    logps, old, _, A, mask, weights = map(torch.tensor, off_policy())
    mask[5] = False  # an empty completion of a negative advantage
    settings = (surrogate, None, 0.28, aggregate, MAX_LEN)
    clean_loss, clean_gradient, clean_stats = policy(
        logps, old, A, mask, *settings, weights, off_policy_mask=OFF_POLICY_D)
    loss, gradient, stats = policy(
        *(x.masked_fill(~mask, junk) for x in (logps, old)), A, mask, *settings,
        weights.masked_fill(~mask, junk), off_policy_mask=OFF_POLICY_D)
    assert stats == clean_stats
    assert loss == pytest.approx(clean_loss, rel=1e-12)
    assert gradient == pytest.approx(clean_gradient, rel=1e-12)
    assert (gradient[~mask.numpy()] == 0).all() and (gradient[3] == 0).all()


@pytest.mark.parametrize("sizes", [[1] * 6, [2, 4]], ids=str)
@pytest.mark.parametrize("surrogate, aggregate", SURROGATE_AND_AGGREGATE)
def test_micro_batches_with_an_off_policy_mask_add_up_to_the_whole(surrogate, aggregate, sizes):
    logps, old, _, A, mask, _ = map(torch.tensor, off_policy())
    settings = (surrogate, 0.2, None, aggregate, MAX_LEN)
    whole_loss, whole_gradient, _ = policy(
        logps, old, A, mask, *settings, off_policy_mask=OFF_POLICY_D)
    B, N = len(A), mask.sum().item()
    normalizer = {"sum": B, "mean": B, "token": N, "constant": B * MAX_LEN}[aggregate]
    parts = [policy(logps[rows], old[rows], A[rows], mask[rows], *settings, None, normalizer,
                    off_policy_mask=OFF_POLICY_D) for rows in torch.arange(6).split(sizes)]
    assert sum(loss for loss, _, _ in parts) == pytest.approx(whole_loss, rel=1e-9)
    gradient = np.concatenate([gradient for _, gradient, _ in parts])
    assert gradient == pytest.approx(whole_gradient, rel=1e-9)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_loss_and_gradient_are_those_of_the_definition(estimator, aggregate):
    logps, old, ref, _, mask, _ = off_policy()

    def value(x):
        d = ref - x
        k3 = np.exp(d) - d - 1
        terms = {"k1": -d, "k2": d**2 / 2, "k3": k3, "weighted": np.exp(x - old) * k3}[estimator]
        return (terms * shares(mask, aggregate)).sum()

    loss, gradient = kl(logps, torch.tensor(ref), torch.tensor(mask), estimator, aggregate,
                        torch.tensor(old), MAX_LEN)
    assert loss == pytest.approx(value(logps), rel=1e-9)
    assert gradient == pytest.approx(numeric_gradient(value, logps), rel=1e-6, abs=1e-8)


def one_token_kl(d, estimator="k3"):
    """(value, gradient) for one token whose reference is d above it."""
    ref, mask = torch.tensor([[d]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    value, gradient = kl(ref * 0, ref, mask, estimator)
    return value, gradient.item()


@pytest.mark.parametrize("d, value, within", [
    (0.3, 0.0499, 5e-5), (-0.3, 0.0408, 5e-5), (10.0, 22015, 0.5), (0.0, 0.0, 0.0)])
def test_k3_is_never_negative_and_uneven(d, value, within):
    assert one_token_kl(d)[0] == pytest.approx(value, abs=within)


@pytest.mark.parametrize("estimator", ["k2", "k3", "weighted"])
def test_at_equality_the_kl_and_its_gradient_are_zero(estimator):
    assert one_token_kl(0.0, estimator) == (0, 0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("d", [-1000.0, -100.0, 100.0, 1000.0])
def test_far_from_the_reference_the_kl_and_its_gradient_are_finite(estimator, d):
    for dtype in torch.float32, torch.float64:
        ref = torch.tensor([[d]], dtype=dtype)
        loss, gradient = kl(ref * 0, ref, ref != 0, estimator, old_logps=-ref)
        assert math.isfinite(loss) and np.isfinite(gradient).all() and loss != 0


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
    "grpo": (
        ("token", (0.2, 0.28), "mean", False, False, None), 0.147895098, [
            [-0.0489159, -0.0569139, -0.0350381, -0.0400951, -0.0568174, -0.0357327, -0.0338286],
            [0.0331816, 0.0408853, 0.0383732, 0.056241, 0, 0, 0],
            [0] * 7]),
    "grpo, KL": (
        ("token", (0.2, 0.28), "mean", False, False, "k3"), 0.156906173, [
            [-0.0489112, -0.0562265, -0.0371665, -0.0407056, -0.0610103, -0.0370629, -0.0337998],
            [0.0339837, 0.0431797, 0.039134, 0.0538818, -0.0045769, 0, 0],
            [0.0077072, 0, 0, 0, 0, 0, 0]]),
    "sequence level": (
        ("gspo", (0.2, 0.28), "mean", False, False, None), 0.132303804, [
            [-0.0429273, -0.0429273, -0.0429273, -0.0429273, -0.0429273, -0.0429273, -0.0429273],
            [0.036112, 0.036112, 0.036112, 0.036112, 0.036112, 0, 0],
            [0] * 7]),
    "dr_grpo": (
        ("token", (0.2, 0.28), "constant", False, False, None), 0.0239592437, [
            [-0.0214007, -0.0248998, -0.0153292, -0.0175416, -0.0248576, -0.015633, -0.0148],
            [0.0103692, 0.0127767, 0.0119916, 0.0175753, 0, 0, 0],
            [0] * 7]),
    "dapo": (
        ("token", (0.2, 0.28), "token", False, False, None), 0.0807048231, [
            [-0.0720867, -0.0838731, -0.0516351, -0.0590875, -0.0837308, -0.0526587, -0.0498527],
            [0.034928, 0.0430372, 0.0403928, 0.0592011, 0, 0, 0],
            [0] * 7]),
    "cispo": (
        ("cispo", (None, 0.1), "token", False, False, None), -0.122602299, [
            [-0.0720867, -0.0752632, -0.0516351, -0.0590875, -0.0752632, -0.0526587, -0.0498527],
            [0.034928, 0.0405263, 0.0403928, 0.0405263, 0.0220795, 0, 0],
            [0] * 7]),
    "grpo, on-policy": (
        ("token", (0.2, 0.28), "mean", True, False, None), 0.0749999881, [
            [-0.0464286, -0.0464286, -0.0464286, -0.0464286, -0.0464286, -0.0464286, -0.0464286],
            [0.035, 0.035, 0.035, 0.035, 0.035, 0, 0],
            [0] * 7]),
    "grpo, bias-corrected KL": (
        ("token", (0.2, 0.28), "mean", False, False, "weighted"), 0.156833112, [
            [-0.048911, -0.0559779, -0.0362981, -0.0405818, -0.0602115, -0.0366029, -0.0338076],
            [0.0340105, 0.0444722, 0.0392781, 0.0531355, -0.0019475, 0, 0],
            [0.0055222, 0, 0, 0, 0, 0, 0]]),
    "grpo, importance weights": (
        ("token", (0.2, 0.28), "mean", False, True, None), 0.316929042, [
            [-0.0194947, -0.0568388, -0.0618721, -0.0379781, -0.0612373, -0.0344367, -0.0423664],
            [0.0559388, 0.081658, 0.064661, 0.112449, 0, 0, 0],
            [0] * 7]),
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


# ---- Clipping, aggregation, arguments -----------------------------------------------------------


def token_terms(ratios, A, *clip):
    """(loss, gradient by log-ratio, stats) of one-token completions, surrogate "token"."""
    log_ratio = torch.tensor(ratios, dtype=torch.float64).log()[:, None]
    A, mask = torch.tensor(A, dtype=torch.float64), torch.ones(len(ratios), 1, dtype=torch.bool)
    loss, gradient, stats = policy(log_ratio, log_ratio * 0, A, mask, "token", *clip)
    return loss, gradient[:, 0].tolist(), stats


PPO_TABLE = [(1.5, 1, -1.2, 0), (0.5, 1, -0.5, -0.5), (1.5, -1, 1.5, 1.5), (0.5, -1, 0.8, 0),
             (1.1, 1, -1.1, -1.1)]  # eps 0.2: ratio, A, loss, gradient by log-ratio


@pytest.mark.parametrize("ratio, A, loss, gradient", PPO_TABLE)
def test_ppos_table_of_losses_and_gradients(ratio, A, loss, gradient):
    assert token_terms([ratio], [A], 0.2)[:2] == (pytest.approx(loss), [pytest.approx(gradient)])


def test_clip_frac_counts_only_terms_that_lost_their_gradient():
    ratios, A, _, gradients = zip(*PPO_TABLE)
    stats = token_terms(ratios, A, 0.2)[2]
    assert stats["clip_frac"] == pytest.approx(gradients.count(0) / 5) == 0.4


def test_only_an_upper_bound_leaves_no_lower_one():
    loss, gradient, stats = token_terms([1e-3, 1.5], [-1, 1], None, 0.2)
    assert loss == pytest.approx((1e-3 - 1.2) / 2)
    assert gradient == pytest.approx([1e-3 / 2, 0])
    assert stats["clip_frac"] == 0.5


def test_without_bounds_nothing_is_clipped():
    loss, gradient, stats = token_terms([1e-3, 100], [-1, 1])
    assert loss == pytest.approx((1e-3 - 100) / 2)
    assert gradient == pytest.approx([1e-3 / 2, -50])
    assert stats["clip_frac"] == 0


@pytest.mark.parametrize("clip, loss, clip_frac", [((0.0,), -1, 1), ((0.2, 0.0), -1, 1),
                                                   ((0.0, 0.2), -1.1, 0)])
def test_a_bound_of_zero_is_a_bound(clip, loss, clip_frac):
    ours, _, stats = token_terms([1.1], [1], *clip)
    assert ours == pytest.approx(loss)
    assert stats["clip_frac"] == clip_frac


@pytest.mark.parametrize("aggregate, value", [
    ("token", -0.5), ("mean", 0), ("constant", -1 / 3), ("sum", -2)])
def test_aggregations_of_a_group_whose_good_completions_are_long(aggregate, value):
    A, mask = torch.tensor([1.0, -1, 1, -1]), torch.arange(6) < torch.tensor([[6], [2], [6], [2]])
    logps = torch.full((4, 6), -1.5)
    loss, _, _ = policy(logps, logps, A, mask, "token", 0.2, None, aggregate, 6)
    assert loss == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_as_many_tokens_as_rows_do_not_turn_advantages_along_time(surrogate):
    A, mask = torch.tensor([1.0, -3.0]), torch.ones(2, 2, dtype=torch.bool)
    logps = torch.tensor([[-1.0, -2], [-3, -4]])
    _, gradient, _ = policy(logps, logps, A, mask, surrogate, 0.2)
    per_token = 2 if surrogate == "gspo" else 1  # its log-ratio is the mean over the tokens
    assert gradient * per_token == pytest.approx(np.array([[-0.5, -0.5], [1.5, 1.5]]))


ARGS = (torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2), torch.ones(2, 3, dtype=torch.bool))


def test_cispo_without_a_cap_is_refused():
    with pytest.raises(ValueError):
        grpo.policy_loss(*ARGS, "cispo")


def test_an_unknown_surrogate_is_refused():
    with pytest.raises(ValueError):
        grpo.policy_loss(*ARGS, "ppo", 0.2)


def test_an_unknown_aggregation_estimator_or_scale_is_refused():
    logps, _, _, mask = ARGS
    for wrong in (lambda: grpo.policy_loss(*ARGS, "token", aggregate="average"),
                  lambda: grpo.kl_loss(logps, logps, mask, "k3", "average"),
                  lambda: grpo.kl_loss(logps, logps, mask, "k4"),
                  lambda: grpo.group_advantages(torch.tensor([[0.0, 1.0]]), "population")):
        with pytest.raises((KeyError, ValueError)):
            wrong()


def test_the_defaults_are_the_first_books_loss_and_k3():
    logps, old, ref, A, mask, _ = map(torch.tensor, off_policy())
    expected = -(A[:, None] * logps * mask).sum() / len(A)
    assert policy(logps, old, A, mask)[0] == pytest.approx(expected.item())
    d = (ref - logps)[mask]
    expected = (d.exp() - d - 1).sum() / len(A)
    assert kl(logps, ref, mask)[0] == pytest.approx(expected.item())
    assert group([0, 1]).tolist() == group([0, 1], scale="std", eps=1e-4).tolist()


# ---- The completion mask and the advantages -----------------------------------------------------


@pytest.mark.parametrize("eos_ids", [[256, 257], {256, 257}, (257, 256, 9)])
def test_mask_ends_with_the_first_of_several_eos(eos_ids):
    ids = torch.tensor([[1, 2, 257, 256, 256], [1, 256, 256, 256, 256], [1, 2, 3, 4, 5]])
    mask = grpo.completion_mask(ids, eos_ids)
    assert mask.dtype == torch.bool
    assert mask.long().tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]


def test_mask_takes_a_single_eos_id_and_none():
    ids = torch.tensor([[7, 0, 7, 0], [0, 0, 0, 0], [5, 6, 7, 8]])
    assert grpo.completion_mask(ids, 0).long().tolist() == [
        [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert grpo.completion_mask(ids, []).all()


def test_mask_trains_the_real_eos_where_padding_is_the_eos():
    ids = torch.tensor([[5, 6, 2, 2, 2]])  # EOS 2, padded with 2
    assert grpo.completion_mask(ids, 2).long().tolist() == [[1, 1, 1, 0, 0]]


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_advantages_of_exactly_zero(dtype, scale):
    for G in range(2, 17):
        table = torch.tensor([0.1, 0.2, 0.3, 0.7, 0.9, 1 / 3, 0.0, -1e4], dtype=dtype)
        for eps in 1e-4, 0.0:  # a float32 std of eight times 0.1 is not 0 but 8e-9
            ours = grpo.group_advantages(table[:, None].repeat(1, G), scale, eps)
            assert (ours == 0).all() and ours.shape == (8, G)


def test_statistics_are_the_groups_not_the_batchs():
    table = torch.tensor([[1.0, 1, 1], [0, 0, 0], [0, 3, 6]])
    ours = grpo.group_advantages(table)
    assert ours[:2].tolist() == [[0] * 3] * 2
    assert ours[2].tolist() == pytest.approx([-3 / 3.0001, 0, 3 / 3.0001], abs=1e-6)


def test_std_takes_the_unit_of_the_reward_away_and_none_keeps_it():
    table = torch.tensor([[0.0, 4], [0, 1]])
    ours = grpo.group_advantages(table)
    half = 1 / math.sqrt(2)  # unbiased std of two values: their distance / sqrt(2)
    assert ours.flatten().tolist() == pytest.approx([-half, half] * 2, abs=2e-4)  # eps
    assert grpo.group_advantages(table, "none").tolist() == [[-2, 2], [-0.5, 0.5]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32])
def test_integer_and_bool_rewards_are_accepted(dtype):
    ours = grpo.group_advantages(torch.tensor([[1, 1, 0, 0]], dtype=dtype))
    a = 0.8658754298
    assert ours.tolist()[0] == pytest.approx([a, a, -a, -a], abs=1e-6)
    assert ours.dtype.is_floating_point


@pytest.mark.parametrize("shape", [(3, 1), (3, 0), (4,)])
def test_a_group_of_one_and_a_flat_vector_are_refused(shape):
    with pytest.raises(ValueError):
        grpo.group_advantages(torch.zeros(shape))


# GDPO: each reward normalised in its group, the weighted sum normalised over all completions.


def by_gdpo(rewards, weights, eps=1e-4):
    """Advantages (P, G) of rewards (P, G, K) by that definition, in float64."""
    r = np.asarray(rewards, dtype=np.float64)
    A = (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1, keepdims=True) + eps)
    total = A @ np.asarray(weights, dtype=np.float64)
    return (total - total.mean()) / (total.std(ddof=1) + eps)


@pytest.mark.parametrize("eps", [1e-4, 0.3])
@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 8, 2), (2, 2, 4), (5, 4, 3), (3, 16, 2)], ids=str)
def test_gdpo_normalises_each_reward_in_its_group_and_then_their_sum_over_all(shape, eps):
    rng = np.random.default_rng(sum(shape))
    r = rng.normal(3, 1, shape) * 10.0 ** np.arange(shape[2])
    weights = rng.uniform(0.2, 2, shape[2]) * (-1) ** np.arange(shape[2])
    for given in (weights.tolist(), torch.tensor(weights)):
        ours = grpo.gdpo_advantages(torch.tensor(r), given, eps)
        assert ours.shape == shape[:2]
        assert ours.numpy() == pytest.approx(by_gdpo(r, weights, eps), rel=1e-9, abs=1e-12)


def test_gdpo_agrees_with_trl():
    # TRL 1.16.0's lines for multi_objective_aggregation="normalize_then_sum", weights 1 and 0.5.
    r = torch.tensor([[[1, 10], [0, 40], [0, 0], [1, 5]], [[3, 0], [0, 0], [1, 0], [0, 2.0]]])
    printed = [0.9119815, -0.1622579, -1.4950999, 0.7453763,
               1.3941226, -1.1461003, -0.2993594, 0.0513372]
    assert grpo.gdpo_advantages(r, [1, 0.5]).flatten().tolist() == pytest.approx(printed, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gdpo_gives_flat_groups_exactly_zero_beside_others_and_alone(dtype):
    r = torch.rand(9, 8, 2, generator=torch.Generator().manual_seed(0), dtype=dtype)
    r[1], r[4] = 0.1, torch.tensor([0.7, -1e4])  # a float32 std of eight times 0.1 is not 0
    ours = grpo.gdpo_advantages(r, [1.0, 0.3])
    assert (ours == 0).all(1).tolist() == [group in (1, 4) for group in range(9)]
    for flat in r[1:2], r[4:5], r[[1, 4]]:
        assert (grpo.gdpo_advantages(flat, [1.0, 0.3]) == 0).all()


def test_what_rounding_leaves_of_equal_rewards_is_no_advantage():
    """0.1 + 0.2 is not 0.3 + 0.0 in float64, and rewards that cancel leave some 1e-12 (by hand)."""
    sums = torch.tensor([[0.1 + 0.2, 0.3 + 0.0, 0.3, 0.2 + 0.1]], dtype=torch.float64)
    assert len(set(sums[0].tolist())) > 1
    for scale in ("std", "none"):
        assert grpo.group_advantages(sums, scale).tolist() == [[0.0] * 4]
    r = torch.tensor([[0.3, 0.1, 0.7, 0.2], [1.0, 0.0, 0.0, 0.5]], dtype=torch.float64)
    cancelling = torch.stack([r, 0.7 - r], 2)  # (2, 4, 2)
    assert grpo.gdpo_advantages(cancelling, [1.0, 1.0]).tolist() == [[0.0] * 4] * 2
    assert grpo.gdpo_advantages(cancelling, [1.0, 0.9]).ne(0).all()  # these do not cancel
    tiny = torch.tensor([[1.0, 1.0 + 1e-9]], dtype=torch.float64)
    assert grpo.group_advantages(tiny).ne(0).all()  # small, but no rounding


def test_gdpo_with_one_reward_rescales_the_groups_advantages_uniformly():
    r = torch.tensor(np.random.default_rng(0).exponential(size=(5, 4)))
    r[2] = 0.1
    ours, plain = grpo.gdpo_advantages(r[..., None], [0.5]), grpo.group_advantages(r)
    live = [0, 1, 3, 4]
    assert (ours[2] == 0).all() and (ours[live] != 0).all()
    # 16 of 20 advantages have, group by group, 3 squares' sum: the std over all of 0.5 A.
    scale = 0.5 / (0.5 * math.sqrt(4 * 3 / 19) + 1e-4)
    assert (ours / plain)[live].flatten().tolist() == pytest.approx([scale] * 16, rel=1e-3)
    assert (ours / plain)[live].std() < 1e-12


def test_under_gdpo_a_reward_of_huge_scale_does_not_drown_a_small_one():
    large, small = f64([1e6, 1e6, 0, 0]), f64([1, 0, 1, 0])
    ours = grpo.gdpo_advantages(torch.stack([large, small], 2), [1, 1])[0]
    # +-a +-a, a their common advantage: 2a, 0, 0, -2a, over their std, sqrt(8/3) a
    assert ours.tolist() == pytest.approx([math.sqrt(1.5), 0, 0, -math.sqrt(1.5)], abs=3e-4)
    summed = grpo.group_advantages(large + small)[0]
    assert abs(summed[0] - summed[1]) < 1e-5 and summed[0] - summed[2] > 1.7


def test_gdpos_weights_decide_between_rewards():
    r = torch.tensor(np.random.default_rng(0).normal(size=(3, 4, 2)))
    first, second = (grpo.gdpo_advantages(r[..., k:k + 1], [1]) for k in (0, 1))
    assert not torch.allclose(first, second, atol=0.1)
    for weights, expected in ([1, 0], first), ([0, 1], second), ([0, -1], -second):
        assert torch.allclose(grpo.gdpo_advantages(r, weights), expected, rtol=1e-12)
    good, format_only = grpo.gdpo_advantages(f64([[1, 0], [0, 1], [0, 0]]), [2, 1])[0, :2]
    assert good > format_only + 0.5


def test_gdpo_refuses_groups_of_one():
    with pytest.raises(ValueError):
        grpo.gdpo_advantages(torch.zeros(3, 1, 2), [1, 1])


def test_gdpo_takes_a_weight_for_each_reward():
    with pytest.raises(ValueError):
        grpo.gdpo_advantages(torch.randn(3, 4, 2), [1.0])


# ---- Micro-batches, padding, non-finite values --------------------------------------------------


def wider(table, columns, fill):
    """Extra columns on the right."""
    return torch.nn.functional.pad(table, (0, columns), value=fill)


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [3, 1], [4]])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_micro_batches_and_pad_columns_give_the_policy_gradient_of_the_whole(
        surrogate, aggregate, weighted, sizes):
    logps, old, _, A, mask, weights = map(torch.tensor, off_policy(B=4))
    settings = (surrogate, 0.2, None, aggregate, MAX_LEN)
    whole_loss, whole_gradient, _ = policy(
        logps, old, A, mask, *settings, weights if weighted else None)
    normalizer = len(mask) if surrogate in PER_COMPLETION else grpo.denominator(
        mask, aggregate, MAX_LEN)
    parts = [policy(wider(logps[rows], n, 0.0), wider(old[rows], n, -9.0), A[rows],
                    wider(mask[rows], n, False), *settings,
                    wider(weights[rows], n, 3.0) if weighted else None, normalizer)
             for n, rows in enumerate(torch.arange(4).split(sizes), 1)]  # n extra columns
    assert sum(loss for loss, _, _ in parts) == pytest.approx(whole_loss, rel=1e-5)
    gradient = np.concatenate([gradient[:, :6] for _, gradient, _ in parts])
    assert gradient == pytest.approx(whole_gradient, rel=1e-5)


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [3, 1], [4]])
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_micro_batches_and_pad_columns_give_the_kl_gradient_of_the_whole(
        estimator, aggregate, sizes):
    logps, old, ref, _, mask, _ = map(torch.tensor, off_policy(B=4))
    whole_loss, whole_gradient = kl(logps, ref, mask, estimator, aggregate, old, MAX_LEN)
    normalizer = grpo.denominator(mask, aggregate, MAX_LEN)
    parts = [kl(wider(logps[rows], n, 0.0), wider(ref[rows], n, -9.0),
                wider(mask[rows], n, False), estimator, aggregate, wider(old[rows], n, -9.0),
                MAX_LEN, normalizer) for n, rows in enumerate(torch.arange(4).split(sizes), 1)]
    assert sum(loss for loss, _ in parts) == pytest.approx(whole_loss, rel=1e-5)
    gradient = np.concatenate([gradient[:, :6] for _, gradient in parts])
    assert gradient == pytest.approx(whole_gradient, rel=1e-5)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_masked_junk_has_no_effect_on_the_policy_loss(surrogate, aggregate, junk):
    logps, old, _, A, mask, weights = map(torch.tensor, off_policy())
    settings = (surrogate, 0.2, None, aggregate, MAX_LEN)
    clean_loss, clean_gradient, clean_stats = policy(logps, old, A, mask, *settings, weights)
    bad_logps, bad_old, bad_weights = (x.masked_fill(~mask, junk) for x in (logps, old, weights))
    loss, gradient, stats = policy(bad_logps, bad_old, A, mask, *settings, bad_weights)
    assert stats == clean_stats
    assert loss == pytest.approx(clean_loss, rel=1e-12)
    assert gradient == pytest.approx(clean_gradient, rel=1e-12)
    assert (gradient[~mask.numpy()] == 0).all()


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_masked_junk_has_no_effect_on_the_kl_loss(estimator, aggregate, junk):
    logps, old, ref, _, mask, _ = map(torch.tensor, off_policy())
    clean_loss, clean_gradient = kl(logps, ref, mask, estimator, aggregate, old, MAX_LEN)
    bad_logps, bad_ref, bad_old = (x.masked_fill(~mask, junk) for x in (logps, ref, old))
    loss, gradient = kl(bad_logps, bad_ref, mask, estimator, aggregate, bad_old, MAX_LEN)
    assert loss == pytest.approx(clean_loss, rel=1e-12)
    assert gradient == pytest.approx(clean_gradient, rel=1e-12)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_all_masked_gives_a_loss_and_gradient_of_zero(aggregate):
    logps, old, ref, A, mask, _ = map(torch.tensor, off_policy())
    nothing = torch.zeros_like(mask)
    for surrogate in SURROGATES:
        loss, gradient, _ = policy(logps, old, A, nothing, surrogate, 0.2, None, aggregate, MAX_LEN)
        assert loss == 0 and (gradient == 0).all()
    for estimator in ESTIMATORS:
        loss, gradient = kl(logps, ref, nothing, estimator, aggregate, old, MAX_LEN)
        assert loss == 0 and (gradient == 0).all()


@pytest.mark.parametrize("surrogate", PER_COMPLETION)
def test_an_empty_completion_adds_nothing_but_counts_as_a_row(surrogate):
    logps, old, _, A, mask, weights = map(torch.tensor, off_policy(B=5))
    mask[0] = False
    full, _, stats = policy(logps, old, A, mask, surrogate, 0.2, weights=weights)
    rest, _, rest_stats = policy(
        logps[1:], old[1:], A[1:], mask[1:], surrogate, 0.2, weights=weights[1:])
    assert full == pytest.approx(rest * 4 / 5)
    assert stats == pytest.approx(rest_stats)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("surrogate, clip", SURROGATE_AND_CLIP)
def test_log_ratios_of_a_thousand_stay_finite(surrogate, clip, dtype):
    old = torch.tensor([[-1000.0, -1000], [0, 0], [-1000, -1000], [0, 0]], dtype=dtype)
    logps = -1000 - old  # log-ratios +1000, -1000, +1000, -1000
    A, mask = torch.tensor([1.0, 1, -1, -1], dtype=dtype), torch.ones(4, 2, dtype=torch.bool)
    loss, gradient, _ = policy(logps, old, A, mask, surrogate, *clip)
    assert math.isfinite(loss) and np.isfinite(gradient).all()


# ---- What follows from the equations ------------------------------------------------------------


def test_k1s_gradient_does_not_contain_the_reference_and_the_others_do():
    logps, old, ref, _, mask, _ = map(torch.tensor, off_policy())
    for estimator in ESTIMATORS:
        (_, one), (_, other) = (
            kl(logps, r, mask, estimator, old_logps=old) for r in (ref, ref - 1))
        assert np.array_equal(one, other) == (estimator == "k1")


def test_k1_pushes_every_sampled_token_down_and_k3_only_those_above_the_reference():
    logps, _, ref, _, mask, _ = map(torch.tensor, off_policy())
    (_, k1), (_, k3) = kl(logps, ref, mask, "k1"), kl(logps, ref, mask, "k3")
    on = mask.numpy()
    assert (k1[on] > 0).all()
    assert ((k3 > 0) == (logps > ref).numpy())[on].all() and 0 < (k3[on] > 0).mean() < 1


def test_old_logps_carry_no_gradient_though_they_are_the_logps_themselves():
    logps, _, _, A, mask, _ = map(torch.tensor, off_policy())
    for surrogate in SURROGATES:
        expected = policy(logps, logps, A, mask, surrogate, 0.2)[1]
        x = logps.clone().requires_grad_()
        grpo.policy_loss(x, x, A, mask, surrogate, 0.2)[0].backward()
        assert np.array_equal(x.grad.numpy(), expected)
    for estimator in ESTIMATORS:  # nor do the reference's
        expected = kl(logps, logps * 1.1, mask, estimator, old_logps=logps)[1]
        x = logps.clone().requires_grad_()
        grpo.kl_loss(x, x * 1.1, mask, estimator, old_logps=x).backward()
        assert np.array_equal(x.grad.numpy(), expected)


def test_the_weighted_kl_without_old_logps_is_on_policy():
    logps, _, ref, _, mask, _ = map(torch.tensor, off_policy())
    loss, gradient = kl(logps, ref, mask, "weighted")
    expected, expected_gradient = kl(logps, ref, mask, "weighted", old_logps=logps)
    assert loss == expected and np.array_equal(gradient, expected_gradient)
    assert not np.allclose(gradient, kl(logps, ref, mask, "k3")[1])  # the ratio has a gradient


@pytest.mark.parametrize("surrogate, aggregate, same_as", [
    ("sequence", "sum", "sum"), ("gspo", "sum", "mean"),
    *(("token", aggregate, aggregate) for aggregate in AGGREGATES)])
@pytest.mark.parametrize("clip", [(None, None), (10, None), (0.2, 0.28)])
def test_on_the_first_pass_the_ratio_is_1_and_the_gradient_reinforces(
        surrogate, aggregate, same_as, clip):
    logps, _, _, _, mask, _ = map(torch.tensor, off_policy(B=4))
    A = group([1, 1, 0, 0])
    loss, gradient, stats = policy(logps, logps, A, mask, surrogate, *clip, aggregate, MAX_LEN)
    _, reinforce, _ = policy(
        logps, logps, A, mask, "reinforce", aggregate=same_as, max_len=MAX_LEN)
    assert stats == {"ratio_mean": 1, "ratio_max": 1, "clip_frac": 0}
    assert gradient == pytest.approx(reinforce, rel=1e-12)
    if surrogate in PER_COMPLETION:
        assert loss == pytest.approx(0, abs=1e-15)  # and yet the gradient is not
    assert np.abs(gradient).max() > 0.01


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_on_the_first_pass_cispo_is_reinforce_in_value_and_gradient(aggregate):
    logps, _, _, A, mask, _ = map(torch.tensor, off_policy())
    loss, gradient, stats = policy(logps, logps, A, mask, "cispo", 4, None, aggregate, MAX_LEN)
    expected, reinforce, _ = policy(
        logps, logps, A, mask, "reinforce", aggregate=aggregate, max_len=MAX_LEN)
    assert loss == pytest.approx(expected, rel=1e-12) and abs(loss) > 0.01
    assert gradient == pytest.approx(reinforce, rel=1e-12)
    assert stats == {"ratio_mean": 1, "ratio_max": 1, "clip_frac": 0}


# ---- Log-probabilities under a model ------------------------------------------------------------


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


def log_softmax(logits):
    logits = np.asarray(logits, dtype=np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@torch.no_grad()
def alone(model, prompt, completion, temperature=1.0):
    """(logps, entropies) of one completion, without padding, mask or position ids."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].float().numpy()
    table = log_softmax(logits / temperature)[len(prompt) - 1:-1]
    return table[np.arange(len(completion)), completion], -(np.exp(table) * table).sum(1)


PROMPTS = [[5, 6, 7], [11, 12, 13, 14, 15, 16, 17, 18], [30]]
COMPLETIONS = [[20, 21, 22, 23, 24], [40, 41], [50, 51, 52, 53]]


def batch(left=0, right=0, pad_id=0):
    """PROMPTS padded on the left, COMPLETIONS on the right, by that many columns more."""
    L, T = 8 + left, 5 + right
    ids, mask = torch.full((3, L + T), pad_id), torch.zeros(3, L + T, dtype=torch.long)
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS)):
        span = slice(L - len(prompt), L + len(completion))
        ids[i, span], mask[i, span] = torch.tensor(prompt + completion), 1
    return ids, mask, T


@pytest.mark.parametrize("left, right", [(0, 0), (3, 0), (0, 4), (5, 2)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("build", [qwen, gpt2])
def test_a_padded_batch_scores_each_row_as_if_alone(build, temperature, left, right):
    model = build()
    ids, mask, T = batch(left, right)
    logps, entropy = grpo.token_logps(model, ids, mask, T, temperature)
    assert logps.shape == entropy.shape == (3, T)
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS)):
        expected, expected_entropy = alone(model, prompt, completion, temperature)
        n = len(completion)
        assert logps[i, :n].detach().numpy() == pytest.approx(expected, abs=1e-4)
        assert entropy[i, :n].numpy() == pytest.approx(expected_entropy, abs=1e-4)


@pytest.mark.parametrize("build", [qwen, gpt2])
def test_the_models_that_test_it_notice_context_and_temperature(build):
    model = build()
    (base, _), (cooler, _) = (alone(model, [5, 6, 7], [20, 21, 22], t) for t in (1.0, 0.6))
    other, _ = alone(model, [0, 5, 6, 7], [20, 21, 22])  # as if a pad token were read
    assert np.abs(base - cooler).max() > 0.3 and np.abs(base - other).max() > 0.3


def test_the_first_completion_token_is_scored_at_the_last_prompt_position():
    model, ids = gpt2(), torch.tensor([[10, 11, 12, 13]])
    with torch.no_grad():
        table = log_softmax(model(input_ids=ids).logits[0].numpy())
    logps, _ = grpo.token_logps(model, ids, torch.ones_like(ids), 2)
    assert logps[0].tolist() == pytest.approx([table[1, 12], table[2, 13]], abs=1e-5)
    # The mask [0, 0, 1, 0] over the four tokens: the loss holds the 12 and nothing else.
    loss, _, _ = policy(logps.detach(), logps, torch.ones(1), torch.tensor([[True, False]]))
    assert loss == pytest.approx(-table[1, 12], abs=1e-5)


def test_gradients_flow_through_logps_and_not_through_entropy():
    model = qwen()
    ids, mask, T = batch()
    logps, entropy = grpo.token_logps(model, ids, mask, T)
    assert not entropy.requires_grad
    logps.sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_taken_in_float32_whatever_the_models_type(dtype):
    model, ids = qwen().to(dtype), torch.tensor([[5, 6, 7, 20, 21, 22, 23]])
    logps, entropy = grpo.token_logps(model, ids, torch.ones_like(ids), 4)
    assert logps.dtype == entropy.dtype == torch.float32
    expected, expected_entropy = alone(model, [5, 6, 7], [20, 21, 22, 23])
    assert logps[0].tolist() == pytest.approx(expected, abs=1e-3)  # bf16 log-softmax: 1e-2 off
    assert entropy[0].tolist() == pytest.approx(expected_entropy, abs=1e-3)


def test_entropy_is_finite_where_probabilities_are_exactly_zero():
    model = Fixed([0.0, -1e4, 0.0, -math.inf])
    ids = torch.tensor([[0, 2, 0]])
    logps, entropy = grpo.token_logps(model, ids, torch.ones_like(ids), 2)
    assert logps[0].tolist() == pytest.approx([-math.log(2)] * 2)
    assert entropy[0].tolist() == pytest.approx([math.log(2)] * 2)


@pytest.mark.parametrize("training", [True, False])
def test_scoring_sees_no_dropout_and_restores_the_training_flag(training):
    model = gpt2(dropout=0.5).train(training)
    ids, mask, T = batch()
    one, two = (grpo.token_logps(model, ids, mask, T)[0] for _ in range(2))
    assert torch.equal(one, two)
    assert model.training == training and model.transformer.drop.training == training
    expected, _ = alone(model.eval(), PROMPTS[0], COMPLETIONS[0])
    assert one[0].tolist() == pytest.approx(expected, abs=1e-4)


def parameter_gradients(model, loss):
    """All of them in one vector."""
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("build", [qwen, gpt2])
def test_with_advantages_of_1_grpo_is_sft(build):
    model = build()
    ids, mask, T = batch()
    logps, _ = grpo.token_logps(model, ids, mask, T)
    loss, _ = grpo.policy_loss(
        logps, logps, torch.ones(3), mask[:, -T:].bool(), "reinforce", aggregate="token")
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-T] = -100  # the prompt
    sft = model(input_ids=ids, attention_mask=mask, labels=labels,
                position_ids=(mask.cumsum(1) - 1).clamp(min=0)).loss
    assert loss.item() == pytest.approx(sft.item(), rel=1e-5)
    ours, theirs = parameter_gradients(model, loss), parameter_gradients(model, sft)
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()


@pytest.mark.parametrize("surrogate, aggregate", [
    ("reinforce", "token"), ("token", "mean"), ("sequence", "sum")])
def test_micro_batches_give_the_models_gradient_of_the_whole(surrogate, aggregate):
    model, A = gpt2(), torch.tensor([1.0, -0.4, 0.7])
    ids, attention_mask, T = batch()
    mask = attention_mask[:, -T:].bool()
    with torch.no_grad():
        old = grpo.token_logps(model, ids, attention_mask, T)[0] - 0.1
    normalizer = 3 if surrogate in PER_COMPLETION else grpo.denominator(mask, aggregate)

    def loss(rows, normalizer=None):
        logps, _ = grpo.token_logps(model, ids[rows], attention_mask[rows], T)
        return grpo.policy_loss(logps, old[rows], A[rows], mask[rows], surrogate,
                                aggregate=aggregate, normalizer=normalizer)[0]

    whole = parameter_gradients(model, loss([0, 1, 2]))
    for parts in ([0], [1], [2]), ([0, 2], [1]):
        ours = parameter_gradients(model, sum(loss(rows, normalizer) for rows in parts))
        assert (ours - whole).norm() < 1e-5 * whole.norm()


# ---- Sampling -----------------------------------------------------------------------------------

EOS, PAD = 256, 257  # of the byte tokenizer


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
    """Let model.generate also keep its scores and logits, (T, B, V), and the training flag."""
    generate, seen = model.generate, []

    def kept(*args, **settings):
        out = generate(*args, **settings, output_scores=True, output_logits=True,
                       return_dict_in_generate=True)
        seen.append(SimpleNamespace(scores=torch.stack(out.scores), training=model.training,
                                    logits=torch.stack(out.logits)))
        return out.sequences

    monkeypatch.setattr(model, "generate", kept)
    return seen


def sampled_logps(scores, rollout):
    """Log-probability of each token of the rollout's mask under the sampler's scores (T, B, V)."""
    ids = rollout.input_ids[:, -len(scores):].numpy()
    table = log_softmax(scores.transpose(0, 1).numpy())  # (B, T, V)
    return np.take_along_axis(table, ids[..., None], 2)[..., 0][rollout.mask.numpy()]


HOSTILE = dict(
    do_sample=True, temperature=0.2, top_k=2, top_p=0.1, min_p=0.3, typical_p=0.4,
    epsilon_cutoff=0.01, eta_cutoff=0.01, repetition_penalty=5.0, no_repeat_ngram_size=2,
    min_new_tokens=6, min_length=12, max_length=9, suppress_tokens=[1, 2, 3, 65, 66],
    begin_suppress_tokens=[4, 5, 6, 67], forced_bos_token_id=9, forced_eos_token_id=7,
    bad_words_ids=[[10], [11, 12]], exponential_decay_length_penalty=(2, 1.5),
    sequence_bias=[[[20], 10.0]], remove_invalid_values=True, renormalize_logits=True,
    num_return_sequences=2, guidance_scale=2.0, stop_strings=["a"], max_time=1e-9)


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])  # from the second no mask can be guessed
@pytest.mark.parametrize("build", [qwen, gpt2])
def test_the_sampler_draws_from_the_distribution_that_is_scored(build, pad, monkeypatch):
    model, tokenizer, temperature = build(vocab_size=258), byte_tokenizer(), 0.7
    tokenizer.pad_token = pad
    hostile = model.generation_config = transformers.GenerationConfig(
        **HOSTILE, eos_token_id=[3, 4, 5, 6])
    settings_before = hostile.to_dict()
    seen = spy(monkeypatch, model)
    rollout = grpo.sample(model, tokenizer, ["a", "a longer prompt"], 4, 8, temperature)

    T = rollout.mask.shape[1]
    scores, logits = seen[0].scores, seen[0].logits
    assert scores.isfinite().all()  # nothing was cut off
    assert scores.numpy() == pytest.approx(logits.numpy() / temperature, rel=1e-5, abs=1e-6)
    sampler = sampled_logps(scores, rollout)
    logps, _ = grpo.token_logps(model, rollout.input_ids, rollout.attention_mask, T, temperature)
    assert logps[rollout.mask].tolist() == pytest.approx(sampler.tolist(), abs=1e-4)
    assert model.generation_config is hostile and hostile.to_dict() == settings_before


def test_a_model_with_dropout_samples_without_and_keeps_its_training_flag(monkeypatch):
    model = gpt2(dropout=0.5, vocab_size=258).train()
    seen = spy(monkeypatch, model)
    rollout = grpo.sample(model, byte_tokenizer(), ["ab", "abcd"], 3, 6)
    assert model.training and not seen[0].training
    T = rollout.mask.shape[1]
    sampler = sampled_logps(seen[0].scores, rollout)  # equal: ratio 1 and KL 0 at step 0
    logps, _ = grpo.token_logps(model, rollout.input_ids, rollout.attention_mask, T)
    assert logps[rollout.mask].tolist() == pytest.approx(sampler.tolist(), abs=1e-4)


def test_top_p_keeps_the_smallest_nucleus_and_nothing_else_is_changed(monkeypatch):
    model = qwen(vocab_size=258)
    seen = spy(monkeypatch, model)
    grpo.sample(model, byte_tokenizer(), ["abc"], 4, 3, temperature=0.5, top_p=0.6)
    for scores, logits in zip(seen[0].scores.flatten(0, 1), seen[0].logits.flatten(0, 1)):
        kept = scores.isfinite()
        p = np.exp(log_softmax(logits.numpy() / 0.5))
        order = np.argsort(-p)
        nucleus = order[:np.searchsorted(p[order].cumsum(), 0.6) + 1]
        assert set(kept.nonzero()[:, 0].tolist()) == set(nucleus.tolist())
        assert scores[kept].tolist() == pytest.approx((logits[kept] / 0.5).tolist(), rel=1e-5)


def test_group_completions_are_drawn_independently():
    torch.manual_seed(0)
    rollout = grpo.sample(qwen(vocab_size=258), byte_tokenizer(), ["abc"], 8, 6)
    assert len({tuple(row) for row in rollout.input_ids.tolist()}) > 4


@pytest.mark.parametrize("pad", ["<pad>", None, "<eos>"])
@pytest.mark.parametrize("as_ids", [False, True])
def test_a_rollout_is_prompt_major_with_mask_flags_and_texts_right(as_ids, pad):
    tokenizer, model = byte_tokenizer(), qwen(vocab_size=258)
    tokenizer.pad_token = pad
    own = list(range(25))  # EOS ids in the model's generation config, beside the tokenizer's
    model.generation_config.eos_token_id = own
    texts = ["a", "a longer prompt", "mid"]
    prompts = tokenizer(texts)["input_ids"]
    torch.manual_seed(1)
    rollout = grpo.sample(model, tokenizer, prompts if as_ids else texts, 4, 7)

    T = rollout.mask.shape[1]
    L = rollout.input_ids.shape[1] - T
    assert L == 15 and rollout.mask.shape == (12, T) and rollout.mask.dtype == torch.bool
    assert rollout.truncated.shape == (12,) and rollout.truncated.dtype == torch.bool
    assert rollout.attention_mask.shape == rollout.input_ids.shape
    for i in range(12):
        prompt, ids = prompts[i // 4], rollout.input_ids[i, L:].tolist()
        assert rollout.input_ids[i, L - len(prompt):L].tolist() == prompt
        ends = [t for t, token in enumerate(ids) if token in (*own, EOS)]
        n = ends[0] + 1 if ends else T
        expected = [0] * (L - len(prompt)) + [1] * (len(prompt) + n) + [0] * (T - n)
        assert rollout.attention_mask[i].tolist() == expected
        assert rollout.mask[i].long().tolist() == expected[L:]
        assert rollout.truncated[i].item() == (not ends)
        assert rollout.texts[i] == tokenizer.decode(ids[:ends[0]] if ends else ids)
    assert 0 < rollout.truncated.sum() < 12  # both kinds were there


def ids_of(text):
    return byte_tokenizer()(text)["input_ids"]


@pytest.mark.parametrize("own", [None, 3, [3, 4]])
def test_eos_ids_are_the_generation_configs_united_with_the_tokenizers(monkeypatch, own):
    model = qwen(vocab_size=258)
    model.generation_config.eos_token_id = own
    completions = [[9, EOS, PAD, PAD], [9, 9, 3, 5], [9, 4, 9, 9], [9, 9, 9, 9], [9, 9, 9, EOS]]
    seen = script(monkeypatch, model, completions)
    rollout = grpo.sample(model, byte_tokenizer(), ["x"], 5, 4)
    lengths = [2, 3 if own else 4, 2 if own == [3, 4] else 4, 4, 4]
    assert rollout.mask.sum(1).tolist() == lengths
    assert rollout.truncated.tolist() == [False, own is None, own != [3, 4], True, False]
    told = seen[0].config.eos_token_id
    assert set(told if isinstance(told, list) else [told]) == {
        EOS, *(own if isinstance(own, list) else [own] if own else [])}


def test_text_ends_before_the_first_eos_and_keeps_other_special_tokens(monkeypatch):
    tokenizer, model = byte_tokenizer(), qwen(vocab_size=262)
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)  # 258, 259
    think = [258, *ids_of("7 , it 's 7 ."), 259]
    n = len(think)
    script(monkeypatch, model, [[*think, EOS, *ids_of("x")], [EOS, *think, PAD],
                                [*think, *ids_of("ab")]])
    rollout = grpo.sample(model, tokenizer, ["x"], 3, n + 2)
    text = "<think>7 , it 's 7 .</think>"
    assert rollout.texts == [text, "", text + "ab"]
    assert rollout.mask.sum(1).tolist() == [n + 1, 1, n + 2]


def test_ids_above_the_tokenizers_size_are_trained_and_do_not_crash_the_text(monkeypatch):
    model = qwen(vocab_size=300)
    script(monkeypatch, model, [[*ids_of("a"), 299, *ids_of("b"), EOS], [299, 298, 297, 296]])
    rollout = grpo.sample(model, byte_tokenizer(), ["x"], 2, 4)
    assert rollout.texts == ["ab", ""]
    assert rollout.mask.all()
    assert rollout.input_ids[1, -4:].tolist() == [299, 298, 297, 296]


def test_the_sampled_ids_are_kept_though_their_text_would_encode_to_others(monkeypatch):
    tokenizer, model = byte_tokenizer(), qwen(vocab_size=262)
    tokenizer.add_tokens(["abc"])  # "a", "b", "c" written one by one decode to "abc": one id
    script(monkeypatch, model, [[*ids_of("abc"), EOS]])
    rollout = grpo.sample(model, tokenizer, ["x"], 1, 4)
    assert tokenizer(rollout.texts[0])["input_ids"] == [258]
    assert rollout.input_ids[0, -4:].tolist() == [*ids_of("abc"), EOS]


def test_a_prompt_may_hold_the_pad_and_eos_token_and_still_be_attended(monkeypatch):
    tokenizer, model = byte_tokenizer(), qwen(vocab_size=258)
    tokenizer.pad_token = tokenizer.eos_token
    script(monkeypatch, model, [[9, 9]] * 2)
    rollout = grpo.sample(model, tokenizer, [[EOS, 5, EOS], [6]], 1, 2)
    assert rollout.attention_mask.tolist() == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]


def test_without_any_eos_every_completion_runs_to_the_limit():
    tokenizer, model = byte_tokenizer(), qwen(vocab_size=258)
    tokenizer.eos_token = tokenizer.pad_token = None
    rollout = grpo.sample(model, tokenizer, ["x"], 2, 5)
    assert rollout.mask.shape == (2, 5) and rollout.mask.all() and rollout.truncated.all()


def test_an_exception_while_sampling_leaves_config_and_training_flag_as_they_were(monkeypatch):
    model = gpt2(vocab_size=258).train()
    config = model.generation_config = transformers.GenerationConfig(**HOSTILE)

    def generate(*args, **settings):
        assert model.generation_config is not config
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model, "generate", generate)
    with pytest.raises(RuntimeError, match="out of memory"):
        grpo.sample(model, byte_tokenizer(), ["x"], 2, 4)
    assert model.generation_config is config and model.training


# ---- Rewards ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("text", [
    "<answer>" * 50_000, "</answer>" * 50_000, "</answer><answer>" * 50_000,
    "<answer>" + " " * 500_000, "<" * 500_000, "<answer>x</answer>" * 30_000])
def test_tags_take_linear_time(text):
    start = time.perf_counter()
    rewards.tags_reward(completions=[text])
    assert time.perf_counter() - start < 2  # linear: some 0.02 s; quadratic: minutes


EXAMPLES = [{"prompt": "p", "answer": 1}, {"prompt": "q", "answer": "two"}]


def score(*returned, completions=("a", "b")):
    """What rewards.score makes of reward functions that return these values."""

    def function(value):
        def bad_reward(completions, **columns):
            return value
        return bad_reward

    return rewards.score([function(value) for value in returned], list(completions), EXAMPLES)


@pytest.mark.parametrize("wrong", [
    None, math.nan, math.inf, -math.inf, "1", b"1", 10**400, -10**400, 10**5000, [1.0], 1 + 0j,
    np.float64("nan"), torch.tensor(math.inf), torch.tensor([1.0, 2.0]), np.array([1.0, 2.0])],
    ids=lambda wrong: repr(wrong) if not isinstance(wrong, int) else "huge")
def test_a_reward_that_is_no_finite_number_is_refused_by_function_and_row(wrong):
    with pytest.raises(rewards.RewardError) as error:
        score([0.5, wrong])
    assert "bad" in str(error.value) and re.search(r"row 1\b", str(error.value))


@pytest.mark.parametrize("wrong", [
    None, 1.0, [], [1.0], [1.0] * 3, "ab", {"a": 1, "b": 2}, (v for v in (1.0, 2.0)),
    np.float64(1), np.ones(3), torch.tensor(1.0), torch.ones(1)],
    ids=lambda wrong: repr(wrong).partition(" at 0x")[0])
def test_rewards_of_the_wrong_number_or_kind_are_refused_by_function(wrong):
    with pytest.raises(rewards.RewardError, match="bad"):
        score(wrong)


@pytest.mark.parametrize("wrong", [np.ones((2, 1)), torch.ones(2, 1), np.array(["1", "2"]),
                                   [math.nan, 1.0], torch.tensor([math.nan, 1])],
                         ids=lambda wrong: repr(wrong))
def test_a_table_or_an_array_with_a_wrong_first_row_is_refused_by_function_and_row(wrong):
    with pytest.raises(rewards.RewardError, match=r"bad.*row 0\b"):
        score(wrong)


@pytest.mark.parametrize("fine", [
    [1, 0], [True, False], (1.0, 0.0), [np.float32(1), np.int64(0)], [np.bool_(True), 0],
    np.array([1, 0]), np.array([True, False]), np.array([1, 0], np.float16),
    [torch.tensor(1), torch.tensor(0.0)], torch.tensor([1, 0]), torch.tensor([True, False]),
    torch.tensor([1.0, 0.0], requires_grad=True), torch.tensor([1, 0], dtype=torch.bfloat16)],
    ids=lambda fine: repr(fine))
def test_numbers_of_every_ordinary_kind_are_accepted_as_floats(fine):
    table = score([0.25, -3], fine)
    assert table == [[0.25, -3.0], [1.0, 0.0]]
    assert all(type(value) is float for row in table for value in row)


def test_the_first_function_at_fault_is_the_one_named():
    def fine_reward(completions, **columns):
        return [1.0] * len(completions)

    def broken_reward(completions, **columns):
        return [1.0, None]

    with pytest.raises(rewards.RewardError, match="broken") as error:
        rewards.score([fine_reward, broken_reward], ["a", "b"], EXAMPLES)
    assert "fine" not in str(error.value)


def test_columns_and_prompts_arrive_as_lists_aligned_with_the_completions():
    seen = []

    def spy_reward(completions, prompts, **columns):
        seen.append((completions, prompts, columns))
        return [0.0, 1.0]

    assert rewards.score([spy_reward], ["a", "b"], EXAMPLES) == [[0.0, 1.0]]
    assert seen == [(["a", "b"], ["p", "q"], {"answer": [1, "two"]})]


def test_an_exception_inside_a_reward_passes_through():
    def own_reward(completions, **columns):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        rewards.score([own_reward], ["a", "b"], EXAMPLES)


def test_rewards_have_the_signature_that_trl_calls():
    parameters = inspect.signature(rewards.tags_reward).parameters.values()
    assert [p.name for p in parameters][0] == "completions"
    assert any(p.kind == p.VAR_KEYWORD for p in parameters)  # takes columns it does not use


# ==== Reasons: why the terms do what they do, on small policies enumerated exactly ===============


# ==== Reasons: policies small enough to enumerate every outcome, in float64 ======================
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


# ==== Right answers, thinking, and data files ====================================================


def within_50_ms(function, *arguments):
    """The value, and the best of three times: one may fall into another process's turn."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        value = function(*arguments)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05, f"{min(times):.3f} s for {str(arguments)[:60]}"
    return value


CASES = [  # gold, completion, wanted reward
    ("42", "<answer>42</answer>", 1),
    ("42", "<answer> 42 </answer>", 1),
    ("42", "<answer>42.0</answer>", 1),
    ("42", "<answer>+42</answer>", 1),
    ("1000", "<answer>1,000</answer>", 1),
    ("0.5", "<answer>1/2</answer>", 1),
    ("1/2", "<answer>0.5</answer>", 1),
    ("-3", "<answer>\u22123</answer>", 1),
    ("42", r"<answer>\boxed{42}</answer>", 1),
    ("3", "<answer>-3</answer>", 0),
    ("0.333", "<answer>1/3</answer>", 0),
    ("42", "<answer>41 or 42</answer>", 0),
    ("42", "<answer></answer>", 0),
    ("42", "<answer> </answer>", 0),
    ("42", "42", 0),
    ("42", "<answer>42", 0),
    ("42", "</answer>42<answer>", 0),
    ("9", "<think>\na\nb\n</think>\n<answer>\n9\n</answer>", 1),
    ("2", "<think><answer>1</answer></think><answer>2</answer>", 1),
    ("1", "<think><answer>1</answer></think><answer>2</answer>", 0),
    ("2", "use <answer> and </answer> tags: <answer>2</answer>", 1),
    ("nan", "<answer>nan</answer>", 0),
    ("42", "<answer>1 2 3 4 5 41 42 43</answer>", 0),
    ("1", "<answer>True</answer>", 0),
    ("1", "<answer>1/0</answer>", 0),
    # the same kinds, more of them: numbers
    (42, "<answer>42.</answer>", 1),
    (42, "<answer>$42$.</answer>", 1),
    (5, r"<answer>\$5.00</answer>", 1),
    (-5, "<answer>-$5</answer>", 1),
    (0.1, "<answer>1/10</answer>", 1),
    (0.1, "<answer>0.1000000000000000055511151231257827</answer>", 0),
    (1e22, "<answer>1" + "0" * 22 + "</answer>", 1),
    (600, "<answer>6E2</answer>", 1),
    ("1234567", "<answer>1,234,567.0</answer>", 1),
    ("1234", "<answer>12,34</answer>", 0),
    ("1", "<answer>0,001</answer>", 0),
    ("-1/2", "<answer>-.5</answer>", 1),
    ("3", "<answer>--3</answer>", 0),
    ("42", "<answer>\u0664\u0662</answer>", 0),  # 42 in Arabic-Indic digits
    ("100000000000000000001", "<answer>100000000000000000000</answer>", 0),  # equal as floats
    ("0", "<answer>-0.0</answer>", 1),
    ("1e1000", "<answer>10e999</answer>", 0),  # an exponent of four digits is text
    ("42", r"<answer>\text{42}</answer>", 1),
    ("42", r"<answer>42\text{ cm}.</answer>", 1),
    ("42", r"<answer>42\text{ or }43</answer>", 0),
    ("42", r"<answer>42\text{ or 43}</answer>", 0),
    (r"42\text{ cm}", "<answer>42 cm</answer>", 1),
    (r"42\text{ cm}", r"<answer>42\text{ m}</answer>", 0),
    # as text
    ("Paris", "<answer>\n paris </answer>", 1),
    ("New  York", "<answer>new\nyork</answer>", 1),
    ("Stra\u00dfe", "<answer>STRASSE</answer>", 1),
    (True, "<answer>true</answer>", 1),
    (True, "<answer>1</answer>", 0),
    ("Paris", "<answer>Paris or Rome</answer>", 0),
    ("9" * 5000, "<answer>" + "9" * 5000 + "</answer>", 1),
    # what never matches
    *[(gold, f"<answer>{gold}</answer>", 0) for gold in ("NaN", "inf", "-Infinity", "\u221e")],
    (r"-\infty", r"<answer>$-\infty$</answer>", 0),
    *[(float(gold), f"<answer>{gold}</answer>", 0) for gold in ("nan", "inf", "-inf")],
    *[(gold, "<answer>None</answer>\\boxed{}", 0) for gold in ("", " ", None)],
    # where the answer is
    ("2", "<answer>1</answer><answer>2</answer> so <answer>3", 1),
    ("1", "<answer>1</answer> is done </answer>", 1),
    ("1", "<answer>1</answer> in <answer></answer> tags", 1),
    ("2", "the <answer> is <answer>2</answer>", 1),
    ("7", "<answer>7</answer><think>or <answer>8</answer></think>", 1),
    ("1", "<think><answer>1</answer>", 0),
    ("3", "<answer>3</answer><think><answer>4</answer>", 1),
    ("1", "begun in the prompt <answer>1</answer></think><answer>2</answer>", 0),
    ("2", "begun in the prompt <answer>1</answer></think><answer>2</answer>", 1),
    ("1", "<answer>1</answer></think>", 0),
    ("1", "<ans<think></think>wer>1</answer>", 0),
    ("1000", "<answer>1,<think></think>000</answer>", 0),
    ("7", r"so \boxed{6} and \boxed{7}", 1),
    ("7", r"so \boxed{7} and \boxed{8", 1),
    (r"\frac{1}{2}", r"so \boxed{\frac{1}{2}} or so", 1),
    ("7", r"so \boxed{\boxed{7}}", 1),
    ("7", r"<answer>8</answer> \boxed{7}", 0),
    ("7", r"<think>\boxed{7}</think>", 0),
    ("7", r"<answer>x = \boxed{7}</answer>", 1),
    ("42", "\\boxed{<answer>42</answer>}", 1),
]


@pytest.mark.parametrize("gold, completion, wanted", CASES)
def test_correct_reward(gold, completion, wanted):
    chat = [{"role": "assistant", "content": completion}]
    assert correct_reward([completion, chat], [gold, gold], prompts=["", ""]) == [wanted, wanted]


HOSTILE_TEXTS = [
    "-" * 5000 + "1",
    "9" * 5000,
    "<think></think><answer>" * 400,
    "1/0",
    "9**9**9",
    "1e999",
    "1" + ",000" * 25000,
    "0." + "0" * 100000 + "1",
    "\\boxed{" * 5000,
    "\\boxed{" * 14000,
    "\\boxed{}" * 12000,
    "\\boxed{" + "{" * 100000,
    "\\boxed{" + "{}" * 50000,
    "\\text{" * 16000,
    "\\text{" + " " * 100000,
    "\\text{" + "a " * 50000 + "1",
    "\\text{a}" * 12000,
    "\\text{a}" * 12000 + "1",
    "\\text{a}" + " " * 100000 + "1",
    " " * 100000,
    "$" * 100000 + "1",
    "<think></think><answer>" * 4300,
    "<think>" * 14000 + "</think>" * 12000,
    "</think>" * 12000,
    "</think><think>" * 6600,
    "<answer>" * 12000 + "</answer>" * 11000,
    "<answer></answer>" * 5800,
    "</answer><answer>" * 5800,
    "<" * 100000,
]


@pytest.mark.parametrize("text", HOSTILE_TEXTS, ids=range(len(HOSTILE_TEXTS)))
def test_hostile_strings_score_0_within_50_ms(text):
    for completion in (text, f"<answer>{text}</answer>", f"\\boxed{{{text}}}"):
        assert within_50_ms(correct_reward, [completion], ["42"]) == [0.0]
        within_50_ms(think_reward, [completion])
    within_50_ms(parse_number, text)


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("7", 7),
        ("007", 7),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        (" 5 ", 5),
        ("-4/6", Fraction(-2, 3)),
        ("1,000/3", Fraction(1000, 3)),
        ("1e3", 1000),
        ("2.5e-1", Fraction(1, 4)),
        ("1e\u22122", Fraction(1, 100)),
        ("1e999", 10**999),
        ("9" * 100, 10**100 - 1),
        (" " * 500 + "1", 1),
        (r"\text{}42", 42),
        (r"$\$1,000$", 1000),
    ],
)
def test_parse_number(text, wanted):
    assert parse_number(text) == wanted and isinstance(parse_number(text), Fraction)


@pytest.mark.parametrize(
    "text",
    ". - $ 1/0 1/00 1/2/3 1/-2 9**9**9 nan inf -Infinity 1_000 1e1000 1e0001 +-1 --1".split()
    + "1,00 1000,000 ,100 1,000,00 1.2.3 1e e5 5% 1j True \u00bd \u00b2 \u0661 \uff11".split()
    + ["\u221e", "", "1 000", "1 2", "9" * 101, "-" * 50 + "1", "42 cm", r"\text{cm}"],
)
def test_no_number(text):
    assert parse_number(text) is None


def test_extract_answer_gives_the_text_or_none():
    assert extract_answer("<answer> a b\n</answer>") == "a b"
    assert extract_answer(r"\boxed{\text{a}{b}} }") == r"\text{a}{b}"
    assert extract_answer("a") is extract_answer("") is extract_answer("<answer></answer>") is None


def test_text_of():
    assert text_of("a") == text_of([{"role": "assistant", "content": "a"}]) == "a"
    assert text_of([{"role": "tool", "content": text} for text in "ab"]) == "a\nb"


def test_golds_must_be_as_many_as_completions():
    with pytest.raises(ValueError):
        correct_reward(["<answer>1</answer>"] * 2, ["1"])


def test_think_counts_when_closed_and_correct_think_only_with_a_correct_answer():
    right, wrong = "<answer>1</answer>", "<answer>2</answer>"
    texts = [f"<think>a</think>{right}", f"<think>a</think>{wrong}", right]
    texts += [f"</think><think>{right}", f"</think><think></think>{right}"]
    texts += [f"<think></think>{right}", f"{right}<think>", ""]
    think, both = [1, 1, 0, 0, 1, 1, 0, 0], [1, 0, 0, 0, 1, 1, 0, 0]
    for completions in (texts, [[{"role": "assistant", "content": text}] for text in texts]):
        columns = {"completions": completions, "answer": ["1"] * 8, "prompts": ["p"] * 8}
        assert think_reward(**columns) == think
        assert correct_think_reward(**columns) == both


# --- data


def write(tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_read_jsonl_with_bom_crlf_blank_lines_and_line_separators_in_strings(tmp_path):
    lines = '{"prompt": "a\u2028b", "answer": 0}\r\n\r\n  \r\n{"answer": "x", "prompt": "c"}'
    rows = [{"prompt": "a\u2028b", "answer": 0}, {"prompt": "c", "answer": "x"}]
    for content in (lines, lines + "\r\n\r\n", "\ufeff" + lines, "\ufeff\r\n" + lines + "\n"):
        assert read_jsonl(str(write(tmp_path, content)), need_answer=True) == rows


@pytest.mark.parametrize(
    "answer", ["0", "0.0", "false", "1.5", '"a"', '"1e999"', '"infinite"', '"+"', '"."']
)
def test_read_jsonl_takes_any_text_and_finite_number(tmp_path, answer):
    assert read_jsonl(write(tmp_path, f'{{"prompt": "a", "answer": {answer}}}'), need_answer=True)


def test_read_jsonl_takes_chat_prompts_and_needs_no_answer_if_told_so(tmp_path):
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "a"}]
    rows = [{"prompt": chat, "x": 1}, {"prompt": "b", "x": None}]
    content = "\n".join(json.dumps(row) for row in rows)
    assert read_jsonl(write(tmp_path, content), need_answer=False) == rows
    assert read_jsonl(write(tmp_path, '{"prompt": "a", "answer": NaN}'), need_answer=False)


NO_OBJECTS = ["{", "[1]", "null", "3", '"a"', "[]", "{}", "{'prompt': 'a'}", '{"prompt": "a"} {}']
NO_OBJECTS += ['[["prompt", "a"]]', '{"prompt": "a", "answer": ' + "9" * 5000 + "}", "[" * 99999]
BAD_PROMPTS = ['""', '" "', "null", "3", "true", "[]", "{}", '["a"]', "[[]]", r'"\ud83d"']
BAD_PROMPTS += ['{"role": "user"}', '{"role": "user", "content": "a"}', '[{"role": "user"}]']
BAD_PROMPTS += ['[{"content": "a"}]', '[{"role": 1, "content": "a"}]']
BAD_PROMPTS += ['[{"role": "", "content": "a"}]']
BAD_PROMPTS += ['[{"role": "user", "content": null}]', '[{"role": "user", "content": ""}]']
BAD_PROMPTS += ['[{"role": "user", "content": "a"}, 3]']
BAD_ANSWERS = ["null", '""', '" \\n"', "NaN", "Infinity", "-Infinity", "1e999", "[1]", "{}"]
BAD_ANSWERS += ['"nan"', '"NaN"', '"inf"', '"+Infinity"', '"\u221e"', '"-\u221e"', r'"\\infty"']
BAD_LINES = [  # the line, and a part of its mend
    *[(line, "JSON") for line in NO_OBJECTS],
    ('{"answer": 1}', '"prompt"'),
    ('{"prompts": "a", "answer": 1}', '"prompt"'),
    *[(f'{{"prompt": {prompt}, "answer": 1}}', '"prompt"') for prompt in BAD_PROMPTS],
    ('{"prompt": "a", "answer": 1, "prompts": 1}', "rename"),
    ('{"prompt": "a", "answer": 1, "completions": 1}', "rename"),
    ('{"prompt": "a"}', '"answer"'),
    *[(f'{{"prompt": "a", "answer": {answer}}}', '"answer"') for answer in BAD_ANSWERS],
    ('{"prompt": "a", "answer": 1, "more": 1}', "columns"),
    (b'{"prompt": "\xff", "answer": 1}', "UTF-8"),
]


@pytest.mark.parametrize("line, mend", BAD_LINES, ids=range(len(BAD_LINES)))
def test_read_jsonl_refuses_a_line_by_its_number(tmp_path, line, mend):
    line = line if isinstance(line, bytes) else line.encode()
    good = b'{"prompt": "a", "answer": 1}'
    path = write(tmp_path, good + b"\r\n\r\n" + line + b"\n" + good)
    with pytest.raises(ValueError) as error:
        read_jsonl(path, need_answer=True)
    message = str(error.value)
    assert message.startswith(f"{path}, line 3: ") and mend in message and "\n" not in message


def test_read_jsonl_refuses_a_column_that_later_lines_lack_and_a_bad_first_line(tmp_path):
    with pytest.raises(ValueError, match="data.jsonl, line 2: .*columns"):
        read_jsonl(write(tmp_path, '{"prompt": "a", "x": 1}\n{"prompt": "b"}'), need_answer=False)
    with pytest.raises(ValueError, match="data.jsonl, line 1: .*answer"):
        read_jsonl(write(tmp_path, '{"prompt": "a"}'), need_answer=True)


@pytest.mark.parametrize("content", ["", "\n\r\n \n", "\ufeff"])
def test_read_jsonl_refuses_a_file_without_examples(tmp_path, content):
    with pytest.raises(ValueError, match="data.jsonl: no examples"):
        read_jsonl(write(tmp_path, content), need_answer=False)


def test_read_jsonl_refuses_other_encodings_and_lets_an_oserror_pass(tmp_path):
    with pytest.raises(ValueError, match="data.jsonl, line 1: .*UTF-8"):
        read_jsonl(write(tmp_path, '{"prompt": "a"}'.encode("utf-16")), need_answer=False)
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path / "none.jsonl", need_answer=False)


# ==== The program, run as a user runs it ==========================================================

PROGRAM = Path(grpo.__file__)


def run(*flags, cwd, expect=0):
    """python grpo.py with these flags, on one thread, the way a user would; -> (stdout, stderr)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, flags)],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=200,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout, done.stderr


def metrics_of(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").open()]


def without_times(metrics):
    return [{k: v for k, v in row.items() if "second" not in k and k != "tokens_per_s"}
            for row in metrics]


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """The built-in tiny model after its warm start: what `--steps 0` saves."""
    folder = tmp_path_factory.mktemp("warm")
    run("--model", "tiny", "--steps", 0, "--out", "run", cwd=folder)
    return folder / "run" / "checkpoint"


@pytest.fixture(scope="session")
def default_run(tmp_path_factory):
    """The README's first command (with the model named, in case this machine has CUDA)."""
    folder = tmp_path_factory.mktemp("default")
    stdout, _ = run("--model", "tiny", "--out", "run", cwd=folder)
    return folder / "run", stdout


def call(*flags):
    """grpo.main in this process: for what needs a look inside, and for speed."""
    return grpo.main([str(flag) for flag in flags])


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def test_the_default_run_raises_the_reward(default_run):
    out, stdout = default_run
    metrics = metrics_of(out)
    assert [row["step"] for row in metrics] == list(range(1, 201))
    first, last = metrics[:5], metrics[-20:]
    assert 0.3 < mean(row["reward"] for row in first) < 1.5
    assert mean(row["reward"] for row in last) > 2.5
    assert stdout.splitlines()[0].startswith("model: tiny")
    assert "--model DIRECTORY" in stdout.splitlines()[0]
    assert set("▁▂▃▄▅▆▇█") & set(stdout)


def test_the_default_run_leaves_what_design_promises(default_run):
    out, _ = default_run
    config = json.loads((out / "config.json").read_text())
    wanted = {"lr": 5e-5, "surrogate": "reinforce", "inner_epochs": 1, "group_size": 8, "seed": 0,
              "max_new_tokens": 64, "temperature": 1.0, "top_p": 1.0, "kl_coef": 0.0, "steps": 200}
    assert {key: config[key] for key in wanted} == wanted
    names = """step reward reward_std reward/tags advantage_std flat_groups loss kl grad_norm
        ratio_mean ratio_max clip_frac entropy length length_max truncated lr tokens_per_s seconds
        seconds_sample seconds_update think""".split()
    metrics = metrics_of(out)
    assert all(set(names) <= set(row) for row in metrics)
    samples = [json.loads(line) for line in (out / "samples.jsonl").open()]
    assert len(samples) == 200 * 8
    for row, group in zip(metrics, [samples[i : i + 8] for i in range(0, 1600, 8)], strict=True):
        rewards_now = rewards.tags_reward([sample["completion"] for sample in group])
        assert [sample["reward"] for sample in group] == rewards_now
        assert row["reward"] == mean(rewards_now)
        assert (row["loss"] is None) == (row["flat_groups"] == 1.0)  # the skipped steps
        if row["loss"] is not None:
            assert row["ratio_mean"] == row["ratio_max"] == 1.0 and row["clip_frac"] == 0.0
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert 400_000 < model.num_parameters() < 600_000
    assert transformers.AutoTokenizer.from_pretrained(out / "checkpoint").eos_token == "<eos>"


def test_same_seed_same_metrics_also_from_the_saved_warm_start(default_run, warm, tmp_path):
    # One test for three promises: the seed decides everything but times; the warm start is
    # reproducible to the byte; and its checkpoint, loaded as a directory, resolves the same rate.
    run("--model", warm, "--out", "again", "--steps", 40, cwd=tmp_path)
    again = without_times(metrics_of(tmp_path / "again"))
    assert again == without_times(metrics_of(default_run[0]))[:40]


def test_another_seed_gives_another_run(default_run, warm, tmp_path):
    call("--model", warm, "--out", tmp_path / "other", "--steps", 2, "--seed", 1)
    other, default = metrics_of(tmp_path / "other"), metrics_of(default_run[0])[:2]
    assert [row["entropy"] for row in other] != [row["entropy"] for row in default]


def test_clip_eps_10_raises_the_reward_and_the_ratio_leaves_1(warm, tmp_path):
    run("--model", warm, "--clip-eps", 10, "--out", "clip", cwd=tmp_path)
    metrics = metrics_of(tmp_path / "clip")
    assert mean(row["reward"] for row in metrics[:5]) < 1.5
    assert mean(row["reward"] for row in metrics[-20:]) > 2.5
    ratios = [row["ratio_mean"] for row in metrics if row["ratio_mean"] is not None]
    assert max(abs(ratio - 1) for ratio in ratios) > 0.01
    config = json.loads((tmp_path / "clip" / "config.json").read_text())
    assert config["surrogate"] == "sequence" and config["inner_epochs"] == 2


def test_steps_0_only_warm_starts_and_saves(warm):
    assert (warm.parent / "metrics.jsonl").read_text() == ""
    assert (warm / "model.safetensors").exists() and (warm.parent / "config.json").exists()


REFUSED = [
    ("--group-size", "1"), ("--group-size", "x"), ("--temperature", "0"), ("--temperature", "-1"),
    ("--top-p", "0"), ("--top-p", "1.1"), ("--steps", "-1"), ("--max-new-tokens", "0"),
    ("--lr", "-1e-5"), ("--lr", "nan"), ("--lr", "inf"), ("--clip-eps", "-0.1"),
    ("--clip-eps", "nan"), ("--clip-eps", "1 2 3"), ("--kl-coef", "-0.1"), ("--kl-coef", "inf"),
    ("--clip-eps", "0.2 --surrogate reinforce"), ("--surrogate", "cispo"), ("--minibatches", "9"),
    ("--minibatches", "0"), ("--inner-epochs", "0"), ("--micro-batch", "0"), ("--ref-every", "5"),
    ("--task", "chess"), ("--surrogate", "ppo"), ("--aggregate", "max"), ("--kl", "k4"),
    ("--prompts-per-step", "0"), ("--log-every", "0"), ("--model", "no/such/directory"),
    ("--advantage", "batch"), ("--dynamic-sampling", "-1"), ("--dynamic-sampling", "0.5"),
    ("--off-policy-mask", "-0.1"), ("--off-policy-mask", "nan"), ("--off-policy-mask", "0.1"),
    ("--aggregate", "mean --clip-eps 10"),  # of sequence, the default with a clip
    *(("--aggregate", f"{aggregate} --surrogate {surrogate} --clip-eps 0.2")  # of which terms?
      for aggregate in AGGREGATES[1:] for surrogate in PER_COMPLETION),
]  # fmt: skip


@pytest.mark.parametrize("flag, value", REFUSED)
def test_a_flag_that_cannot_work_is_refused(flag, value, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if flag != "--model":  # refused before any model is loaded
        monkeypatch.setattr(grpo, "tiny_policy", None)
    given = [] if flag == "--model" else ["--model", "tiny"]
    with pytest.raises(SystemExit) as stopped:
        call(*given, flag, *value.split())
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and flag in error and "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_a_refused_flag_from_the_shell(tmp_path):
    _, stderr = run("--group-size", 1, cwd=tmp_path, expect=2)
    assert stderr.count("\n") == 1 and "--group-size" in stderr


def test_an_out_folder_that_holds_a_run_is_refused(warm, capsys):
    with pytest.raises(SystemExit) as stopped:
        call("--model", "tiny", "--out", warm.parent)
    assert stopped.value.code == 2 and "--out" in capsys.readouterr().err


def test_out_that_is_a_file_and_a_folder_that_is_no_model(warm, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for flags, named in (
        (["--model", warm, "--out", tmp_path / "file"], "--out"),
        (["--model", tmp_path, "--out", tmp_path / "new"], "--model tiny"),
    ):
        with pytest.raises(SystemExit) as stopped:
            call(*flags)
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and error.count("\n") == 1 and named in error


def test_no_hub_is_one_line_that_names_the_alternatives(tmp_path):
    # An address that cannot answer stands for a machine without network; no retries to wait for.
    code = ("import sys, grpo\nfrom unittest import mock\n"
            "def offline(*a, **k): raise OSError(\"We couldn't connect to the hub.\\nMore.\")\n"
            "with mock.patch.object(grpo.AutoModelForCausalLM, 'from_pretrained', offline):\n"
            "    sys.exit(grpo.main(['--model', 'Qwen/Qwen3-0.6B']))\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": str(PROGRAM.parent)})
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "--model tiny" in done.stderr and "--model DIRECTORY" in done.stderr


@pytest.fixture
def make_task(monkeypatch):
    """Add a task of one prompt for this test alone."""
    def make(function, **fields):
        task = rewards.Task(train=[{"prompt": "Say."}], rewards=[function], **fields)
        monkeypatch.setitem(rewards.TASKS, "made", task)
    return make


def weights_of(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same_weights(a, b):
    a, b = weights_of(a), weights_of(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_step_with_equal_rewards_leaves_the_weights_bit_identical(warm, make_task, tmp_path):
    turns = iter(range(100))
    make_task(lambda completions, **_: [float(next(turns) < 8 and i % 2) for i, _ in
                                        enumerate(completions)], small_model_lr=1e-3)
    flags = ["--task", "made", "--model", warm, "--max-new-tokens", 8]
    call(*flags, "--steps", 1, "--out", tmp_path / "one")  # fills Adam's momentum ...
    assert not same_weights(warm, tmp_path / "one" / "checkpoint")
    turns = iter(range(100))
    call(*flags, "--steps", 3, "--out", tmp_path / "three")  # ... which must not act afterwards
    assert same_weights(tmp_path / "one" / "checkpoint", tmp_path / "three" / "checkpoint")
    rows = metrics_of(tmp_path / "three")
    assert [row["flat_groups"] for row in rows] == [0.0, 1.0, 1.0]
    assert [row["grad_norm"] is None for row in rows] == [False, True, True]


def ranked_reward(completions, **columns):
    """By the row alone, so that every group has signal."""
    return [float(row % 3) for row, _ in enumerate(completions)]


def test_micro_batches_change_neither_loss_nor_gradient(warm, make_task, tmp_path):
    make_task(ranked_reward)
    for surrogate in (["--clip-eps", 0.2], ["--clip-eps", 0.2, "--surrogate", "token"]):
        for aggregate in AGGREGATES:
            rows = []
            for size in (8, 3, 1):
                out = tmp_path / f"{surrogate[-1]}-{aggregate}-{size}"
                call("--task", "made", "--model", warm, "--steps", 1, "--max-new-tokens", 12,
                     "--micro-batch", size, *surrogate, "--aggregate", aggregate,
                     "--kl-coef", 0.1, "--out", out)
                rows += metrics_of(out)
            for name in ("loss", "kl", "grad_norm", "ratio_mean", "entropy"):
                values = [row[name] for row in rows]
                assert values == pytest.approx([values[0]] * 3, rel=1e-4, abs=1e-6), name


def count_forwards(monkeypatch):
    calls, real = [], grpo.token_logps
    def counted(model, input_ids, *rest):
        calls.append((torch.is_grad_enabled(), len(input_ids)))
        return real(model, input_ids, *rest)
    monkeypatch.setattr(grpo, "token_logps", counted)
    return calls


@pytest.mark.parametrize("flags, wanted", [
    ([], [(True, 8)]),
    (["--clip-eps", 0.2], [(True, 8)] * 2),  # the first pass gives the old log-probabilities
    (["--clip-eps", 0.2, "--inner-epochs", 1, "--minibatches", 4], [(False, 6)] + [(True, 2)] * 4),
    (["--kl-coef", 0.1], [(False, 8), (True, 8)]),
])  # fmt: skip
def test_no_forward_repeats_an_earlier_one(
    flags, wanted, warm, make_task, tmp_path, monkeypatch
):
    make_task(lambda completions, **_: [float(row) for row, _ in enumerate(completions)])
    calls = count_forwards(monkeypatch)
    call("--task", "made", "--model", warm, "--steps", 1, "--out", tmp_path / "run", *flags)
    assert calls == wanted


def test_old_log_probabilities_are_those_before_the_first_update(warm, make_task, tmp_path):
    make_task(ranked_reward)
    flags = ["--task", "made", "--model", warm, "--steps", 1, "--clip-eps", 0.2, "--minibatches", 3,
             "--temperature", 0.6]
    call(*flags, "--lr", 0, "--out", tmp_path / "still")  # without an update every ratio is 1
    row = metrics_of(tmp_path / "still")[0]
    assert row["ratio_mean"] == pytest.approx(1, abs=1e-4) and row["ratio_max"] < 1.001
    call(*flags, "--lr", 1e-3, "--out", tmp_path / "moved")
    assert abs(metrics_of(tmp_path / "moved")[0]["ratio_mean"] - 1) > 0.1


def test_ref_every_renews_the_reference(warm, make_task, tmp_path):
    make_task(ranked_reward)
    flags = ["--task", "made", "--model", warm, "--steps", 3, "--lr", 1e-3, "--kl-coef", 0.1]
    call(*flags, "--out", tmp_path / "fixed")
    call(*flags, "--ref-every", 1, "--out", tmp_path / "renewed")
    fixed, renewed = metrics_of(tmp_path / "fixed"), metrics_of(tmp_path / "renewed")
    assert fixed[0]["kl"] == pytest.approx(0, abs=1e-6)  # at first they are the same model
    assert fixed[2]["kl"] > 1e-3
    assert [row["kl"] for row in renewed] == pytest.approx([0] * 3, abs=1e-6)


def test_every_surrogate_aggregation_and_estimator_runs(warm, make_task, tmp_path):
    make_task(ranked_reward)
    runs = [["--surrogate", s, *([] if s == "reinforce" else ["--clip-eps", 0.2, 0.3])]
            for s in SURROGATES]
    runs += [["--kl", k, "--kl-coef", 0.1, "--prompts-per-step", 2] for k in ESTIMATORS]
    for i, flags in enumerate(runs):
        out = tmp_path / str(i)
        call("--task", "made", "--model", warm, "--steps", 1, "--max-new-tokens", 8, "--out", out,
             *flags)
        assert math.isfinite(metrics_of(out)[0]["loss"])


@pytest.mark.parametrize("values, said", [
    (lambda n: [1.0] * (n - 1), "7 values for 8"), (lambda n: [None] * n, "row 0"),
    (lambda n: [0.0] * (n - 1) + [math.nan], "row 7"), (lambda n: ["1"] * n, "row 0"),
])  # fmt: skip
def test_a_reward_that_breaks_its_contract_stops_the_run_with_one_line(
    values, said, warm, make_task, tmp_path, capsys
):
    def broken_reward(completions, **columns):
        return values(len(completions))
    make_task(broken_reward)
    with pytest.raises(SystemExit) as stopped:
        call("--task", "made", "--model", warm, "--out", tmp_path / "run")
    message = str(stopped.value.code)  # a string: Python prints it and exits with 1
    assert "broken" in message and said in message and "\n" not in message


def test_a_bug_inside_a_reward_keeps_its_traceback(warm, make_task, tmp_path):
    def buggy_reward(completions, **columns):
        return completions[0].no_such_method()
    make_task(buggy_reward)
    with pytest.raises(AttributeError, match="no_such_method"):
        call("--task", "made", "--model", warm, "--out", tmp_path / "run")


def test_a_gradient_that_is_not_finite_stops_the_run(warm, make_task, tmp_path, monkeypatch):
    make_task(ranked_reward)
    real = grpo.policy_loss
    def poisoned(*args, **kwargs):
        loss, stats = real(*args, **kwargs)
        return loss * math.inf, stats
    monkeypatch.setattr(grpo, "policy_loss", poisoned)
    with pytest.raises(SystemExit) as stopped:
        call("--task", "made", "--model", warm, "--out", tmp_path / "run")
    assert "step 1" in stopped.value.code and "gradient" in stopped.value.code


def test_ctrl_c_finishes_the_step_saves_and_exits_with_130(warm, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-u", PROGRAM, "--model", warm, "--steps", "100000", "--out", "run"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for line in process.stdout:
        if line.startswith("step 1 "):
            break
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in stderr and "checkpoint" in stdout
    done = len(metrics_of(tmp_path / "run"))
    state = torch.load(tmp_path / "run" / "checkpoint" / "trainer.pt")
    assert state["step"] == done >= 1
    weights_of(tmp_path / "run" / "checkpoint")


def test_the_readme_example_of_another_task_runs(warm, tmp_path):
    readme = (PROGRAM.parent / "README.md").read_text()
    code = re.search(r"```python\n(# brief\.py\n.*?)```", readme, re.S).group(1)
    (tmp_path / "brief.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "brief.py", "--task", "brief", "--model", str(warm), "--steps", "3",
         "--out", "run"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parent), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "reward/brief" in metrics_of(tmp_path / "run")[-1]



# ==== Real models, real data, nothing lost ========================================================

BOS, EOS_ID = 258, 256
TEMPLATE = ("{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
            "{% if enable_thinking %}<on>{% else %}<off>{% endif %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}")
NARROW = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32,
          "num_attention_heads": 2, "max_position_embeddings": 64}
SHAPES = {
    "Qwen3": {**NARROW, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True},
    "Llama": NARROW,  # its output embedding is not tied
    "GPT2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64},  # learned positions
    "Bloom": {"hidden_size": 16, "n_layer": 1, "n_head": 2},  # takes no position ids: ALiBi
    "Mamba": {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1},  # has no attention
}


def small_model(name="Qwen3"):
    """A random model of this architecture, its 2-D weights enlarged so that faults show."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, name + "Config")(
            vocab_size=259, bos_token_id=BOS, eos_token_id=EOS_ID, pad_token_id=None,
            **SHAPES[name])
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.dim() == 2 else 1)
    return model


def bos_tokenizer(template=None):
    """A token for each byte, and a BOS that the tokenizer puts before every text; no pad token."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", "<pad>", "<bos>"]
    bytewise = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytewise, bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


def save_small(folder, name="Qwen3", dtype=torch.float32, template=None, **tokens):
    """Write such a model and tokenizer; -> the folder, for --model."""
    small_model(name).to(dtype).save_pretrained(folder)
    tokenizer = bos_tokenizer(template)
    for token, value in tokens.items():
        setattr(tokenizer, token, value)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A model whose step takes some 10 ms, for tests of the loop."""
    return save_small(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture
def made(small, make_task):
    """Flags of a run on it with signal in every group: two of five prompts a step."""
    make_task(ranked_reward)
    rewards.TASKS["made"].train[:] = [{"prompt": f"Say {i * str(i)}."} for i in range(5)]
    return ["--task", "made", "--model", small, "--prompts-per-step", 2, "--group-size", 4,
            "--max-new-tokens", 6, "--lr", 1e-3]


def refused(capsys, *flags):
    """The one line that these flags cost; their exit status must be 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        call(*flags)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1, error
    return error


def samples_of(out):
    return [json.loads(line) for line in (Path(out) / "samples.jsonl").open()]


def same_run(a, b):
    """Bit for bit the same weights, samples, and metrics but for times."""
    return (same_weights(a / "checkpoint", b / "checkpoint")
            and (a / "samples.jsonl").read_bytes() == (b / "samples.jsonl").read_bytes()
            and without_times(metrics_of(a)) == without_times(metrics_of(b)))


# ---- Models -------------------------------------------------------------------------------------


@pytest.fixture
def trained_models(monkeypatch):
    """The models that grpo.train leaves in memory."""
    kept, real = [], grpo.train
    def train(args, task, model, *rest):
        kept.append(model)
        real(args, task, model, *rest)
    monkeypatch.setattr(grpo, "train", train)
    return kept


@pytest.mark.parametrize("name", SHAPES)
def test_a_trained_step_survives_saving_in_every_architecture(
    name, make_task, trained_models, tmp_path
):
    make_task(ranked_reward)
    rewards.TASKS["made"].train[:] = [{"prompt": "Say."}, {"prompt": "Say it all."}]  # padded
    source = save_small(tmp_path / "m", name, torch.bfloat16, TEMPLATE)
    out = tmp_path / "run"
    call("--task", "made", "--model", source, "--steps", 1, "--max-new-tokens", 6, "--lr", 1e-6,
         "--prompts-per-step", 2, "--out", out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint").eval()
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():  # the same logits as the trained model's, which is still in memory
        assert torch.equal(model(ids).logits, trained_models[0].eval()(ids).logits)
    # Adam's first step moves every weight that has a gradient by lr: float32 keeps that, whatever
    # the source's type, and in bf16 (an ulp of 1e-4 at 0.05) nearly all of it would be lost.
    stored = load_file(out / "checkpoint" / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.float32}
    before = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    before, after = (m.get_output_embeddings().weight.detach() for m in (before, model))
    moved = (after - before).abs()
    assert (moved > 5e-7).double().mean() > 0.9 and moved.max() < 2e-6
    assert (after.bfloat16() == before.bfloat16()).double().mean() > 0.9
    # Tied embeddings are one tensor still, and stored once; no row was added for padding.
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (name != "Llama") == ("lm_head.weight" not in stored)
    assert after.shape[0] == 259 and model.config.vocab_size == 259
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "checkpoint")
    assert tokenizer.chat_template == TEMPLATE and tokenizer.pad_token is None
    text = "a <bos>é\n"
    assert tokenizer(text)["input_ids"] == bos_tokenizer()(text)["input_ids"]


@pytest.mark.parametrize("name", ["Bloom", "Mamba"])
def test_a_model_without_position_ids_samples_and_scores_a_padded_row_as_if_alone(
    name, monkeypatch
):
    model, prompts = small_model(name), [[5, 6, 7, 8, 9], [7]]
    logits, real = [], model.generate
    def generate(*args, **settings):
        done = real(*args, **settings, output_logits=True, return_dict_in_generate=True)
        logits.extend(done.logits)
        return done.sequences
    monkeypatch.setattr(model, "generate", generate)
    torch.manual_seed(0)
    rollout = grpo.sample(model, bos_tokenizer(), prompts, 2, 6)
    with torch.no_grad():
        padded, _ = grpo.token_logps(model, rollout.input_ids, rollout.attention_mask, 6)
        for row, prompt in enumerate([prompts[0]] * 2 + [prompts[1]] * 2):
            completion = rollout.input_ids[row, -6:].tolist()
            alone = model(torch.tensor([prompt + completion])).logits[0].log_softmax(1)
            wanted = alone[len(prompt) - 1:-1].gather(1, torch.tensor(completion)[:, None])[:, 0]
            sampled = torch.stack(logits, 1)[row].log_softmax(1)
            sampled = sampled.gather(1, torch.tensor(completion)[:, None])[:, 0]
            keep = rollout.mask[row]
            assert torch.allclose(padded[row][keep], wanted[keep], atol=1e-4)
            assert torch.allclose(sampled[keep], wanted[keep], atol=1e-4)
        # The model notices its context, or this would prove nothing.
        other = model(torch.tensor([[50, 60, 70, 80, 9]])).logits[0, -1].log_softmax(0)
        same = model(torch.tensor([prompts[0]])).logits[0, -1].log_softmax(0)
        assert (other - same).abs().max() > 0.01


@pytest.mark.parametrize("pad", [None, "<eos>", "<pad>"])
def test_the_pad_token_changes_no_sample_and_no_weight(pad, made, tmp_path):
    # None: no pad token, no row added; "<eos>": the real EOS is trained all the same.
    tokens = {} if pad is None else {"pad_token": pad}
    source = save_small(tmp_path / "m", **tokens)
    for out, model in (("here", source), ("there", made[3])):
        call(*made, "--model", model, "--steps", 2, "--out", tmp_path / out)
    assert same_run(tmp_path / "here", tmp_path / "there")
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "here" / "checkpoint")
    assert saved.pad_token == pad


HOSTILE_FILES = {
    "hostile": {"do_sample": True, "top_k": 1, "top_p": 0.1, "repetition_penalty": 9.0,
                "temperature": 0.1, "suppress_tokens": list(range(200)), "max_length": 3,
                "min_new_tokens": 9, "num_beams": 1, "forced_eos_token_id": 250},
    # save_pretrained of this one, changed in memory, raises: a temperature without sampling
    "invalid": {"do_sample": False, "temperature": 0.6, "top_k": 20, "num_beams": 3},
}


@pytest.mark.parametrize("kind", HOSTILE_FILES)
def test_the_models_generation_config_acts_on_nothing_and_is_saved_as_it_was(
    kind, made, tmp_path
):
    source = save_small(tmp_path / "m")
    hostile = {**HOSTILE_FILES[kind], "eos_token_id": [EOS_ID, 7]}
    (source / "generation_config.json").write_text(json.dumps(hostile))
    call(*made, "--model", source, "--steps", 2, "--out", tmp_path / "run")
    plain = save_small(tmp_path / "plain")
    (plain / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID, 7]}))
    call(*made, "--model", plain, "--steps", 2, "--out", tmp_path / "wanted")
    assert same_run(tmp_path / "run", tmp_path / "wanted")
    saved = json.loads((tmp_path / "run" / "checkpoint" / "generation_config.json").read_text())
    assert {key: saved.get(key) for key in hostile if key != "num_beams"} == {
        key: value for key, value in hostile.items() if key != "num_beams"}


def test_a_generation_config_that_transformers_refuses_to_save_does_not_cost_the_weights(
    made, monkeypatch, tmp_path
):
    # As after a change in memory: then save_pretrained raises "GenerationConfig is invalid".
    real = transformers.AutoModelForCausalLM.from_pretrained
    def from_pretrained(*args, **settings):
        model = real(*args, **settings)
        model.generation_config.temperature = 0.6
        model.generation_config.do_sample = False
        return model
    with monkeypatch.context() as patch:
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
        call(*made, "--steps", 1, "--out", tmp_path / "run")
    call(*made, "--steps", 1, "--out", tmp_path / "wanted")
    assert same_weights(tmp_path / "run" / "checkpoint", tmp_path / "wanted" / "checkpoint")
    saved = json.loads((tmp_path / "run" / "checkpoint" / "generation_config.json").read_text())
    assert (saved["temperature"], saved["do_sample"]) == (0.6, False)


def test_dropout_never_acts(make_task, tmp_path):
    # With dropout in sampling or scoring two passes differ: the ratio is not 1, the KL not 0.
    make_task(ranked_reward)
    with torch.random.fork_rng():
        config = transformers.GPT2Config(vocab_size=259, eos_token_id=EOS_ID, bos_token_id=BOS,
                                         resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5,
                                         **SHAPES["GPT2"])
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "m")
    bos_tokenizer().save_pretrained(tmp_path / "m")
    call("--task", "made", "--model", tmp_path / "m", "--steps", 1, "--max-new-tokens", 6,
         "--clip-eps", 0.2, "--lr", 0, "--kl-coef", 0.1, "--out", tmp_path / "run")
    row = metrics_of(tmp_path / "run")[0]
    assert row["ratio_max"] == pytest.approx(1, abs=1e-4) and abs(row["kl"]) < 1e-6


# ---- Prompts ------------------------------------------------------------------------------------


@pytest.fixture
def prompt_ids(monkeypatch):
    """The prompts, as lists of ids, that reach grpo.sample."""
    seen, real = [], grpo.sample
    def sample(model, tokenizer, prompts, *rest, **settings):
        seen.extend(prompts)
        return real(model, tokenizer, prompts, *rest, **settings)
    monkeypatch.setattr(grpo, "sample", sample)
    return seen


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say."}]


@pytest.mark.parametrize("template, prompt, flags, text", [
    (None, "Say.", [], "Say."),
    (TEMPLATE, "Say.", [], "[user]Say.<off>[assistant]"),
    (TEMPLATE, "Say.", ["--thinking"], "[user]Say.<on>[assistant]"),
    (TEMPLATE, "Say.", ["--no-chat-template"], "Say."),
    (TEMPLATE, MESSAGES, [], "[system]Be brief.[user]Say.<off>[assistant]"),
    (TEMPLATE, MESSAGES, ["--no-chat-template"], "Be brief.\nSay."),
    (None, MESSAGES, [], "Be brief.\nSay."),
])
def test_a_prompt_is_rendered_with_exactly_one_bos_and_printed(
    template, prompt, flags, text, made, prompt_ids, tmp_path, capsys
):
    source = save_small(tmp_path / "m", template=template)
    rewards.TASKS["made"].train[:] = [{"prompt": prompt}]
    call(*made, "--model", source, "--steps", 1, "--out", tmp_path / "run", *flags)
    wanted = [BOS, *bos_tokenizer()(text)["input_ids"][1:]]
    assert wanted.count(BOS) == 1 and prompt_ids == [wanted] * 2
    assert f"first prompt: {'<bos>' + text!r}\n" in capsys.readouterr().out
    assert samples_of(tmp_path / "run")[0]["prompt"] == prompt


@pytest.mark.parametrize("kind", ["training", "held-out"])
@pytest.mark.parametrize("prompt, fits", [("", False), ("x" * 58, True), ("x" * 59, False)])
def test_a_prompt_that_is_empty_or_leaves_no_room_is_refused_by_row(
    kind, prompt, fits, make_task, tmp_path, capsys
):
    # 64 positions less 6 new tokens: 58 bytes fit, 59 do not; with learned positions the longest
    # that fits runs, and one more would crash or be cut.
    make_task(ranked_reward)
    task, examples = rewards.TASKS["made"], [{"prompt": "p", "answer": "a"}] * 2
    task.train[:], task.test[:] = examples, examples
    (task.train if kind == "training" else task.test)[1] = {"prompt": prompt, "answer": "a"}
    source = save_small(tmp_path / "m", "GPT2")
    grpo.tiny_policy()[1].save_pretrained(source)  # adds no BOS: "" is no token at all
    flags = ["--task", "made", "--model", source, "--max-new-tokens", 6, "--steps", 1,
             "--prompts-per-step", 2, "--group-size", 2, "--eval-every", 1, "--out", tmp_path / "o"]
    if fits:
        assert call(*flags) == 0
        return
    error = refused(capsys, *flags)
    assert f"{kind} example 2" in error and str(len(prompt)) in error
    assert "--max-new-tokens" in error
    assert not (tmp_path / "o").exists()


def test_a_chat_template_that_raises_is_refused_by_row(made, tmp_path, capsys):
    # As Gemma's does for a system message.
    template = ("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}"
                "{% endif %}{{ messages[0].content }}")
    source = save_small(tmp_path / "m", template=template)
    rewards.TASKS["made"].train[:] = [{"prompt": "Say."}, {"prompt": MESSAGES}]
    error = refused(capsys, *made, "--model", source, "--out", tmp_path / "run")
    assert "training example 2" in error and "no system role" in error


DAMAGE = {
    "empty": lambda folder: [path.unlink() for path in folder.iterdir()],
    "config only": lambda folder: [path.unlink() for path in folder.iterdir()
                                   if path.name != "config.json"],
    "config no JSON": lambda folder: (folder / "config.json").write_text("{oops"),
    "another architecture": lambda folder: (folder / "config.json").write_text(
        '{"model_type": "t5"}'),
    "weights cut short": lambda folder: os.truncate(folder / "model.safetensors", 5000),
    "weights of another shape": lambda folder: (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace('"vocab_size": 259', '"vocab_size": 300')),
    "no tokenizer": lambda folder: [path.unlink() for path in folder.glob("token*")],
    "tokenizer of no kind": lambda folder: (folder / "tokenizer.json").write_text("{}"),
}


@pytest.mark.parametrize("name", ["Qwen3", "Llama", "GPT2"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_folder_that_holds_no_whole_model_costs_one_line(damage, name, tmp_path, capsys):
    save_small(tmp_path / "m", name)  # without a tokenizer some get one of special tokens alone
    DAMAGE[damage](tmp_path / "m")
    error = refused(capsys, "--model", tmp_path / "m", "--out", tmp_path / "o")
    assert f"--model {tmp_path / 'm'}" in error and len(error) < 600
    assert ("tokenizer" in error) == (damage == "no tokenizer") or damage == "tokenizer of no kind"
    assert not (tmp_path / "o").exists()


# ---- Data ---------------------------------------------------------------------------------------


@pytest.fixture
def ranked(monkeypatch):
    """--reward ranked, which keeps the columns that it is called with."""
    seen = []
    def ranked_reward(completions, **columns):
        seen.append(columns)
        return [float(row % 3) for row, _ in enumerate(completions)]
    monkeypatch.setitem(rewards.REWARDS, "ranked", ranked_reward)
    return seen


def data_flags(small, data, *flags):
    return ["--model", small, "--data", data, "--group-size", 2, "--max-new-tokens", 4,
            "--steps", 1, *flags]


def test_crlf_a_bom_and_blank_lines_are_fine_and_all_columns_reach_the_rewards(
    small, ranked, tmp_path
):
    rows = [{"prompt": "é\u2028?", "answer": 4, "level": ["x", None]},
            {"prompt": "b", "answer": "five", "level": []}]
    lines = [json.dumps(rows[0], ensure_ascii=False), "", "  ", json.dumps(rows[1]), "", ""]
    (tmp_path / "d.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    call(*data_flags(small, tmp_path / "d.jsonl", "--reward", "ranked", "--out", tmp_path / "run",
                     "--prompts-per-step", 2))
    (columns,) = ranked
    assert set(columns) == {"prompts", "answer", "level"}
    order = rows if columns["answer"][0] == 4 else rows[::-1]
    twice = [row for row in order for _ in range(2)]  # prompt-major, a group of two each
    assert columns["answer"] == [row["answer"] for row in twice]
    assert columns["level"] == [row["level"] for row in twice]
    assert columns["prompts"] == [row["prompt"] for row in twice]
    assert [s["prompt"] for s in samples_of(tmp_path / "run")] == columns["prompts"]


GOOD = '{"prompt": "p", "answer": 1}'


@pytest.mark.parametrize("line", [
    "p", "[1]", '"p"', "3", "null", "{", '{"answer": 1}', '{"prompt": "", "answer": 1}',
    '{"prompt": " ", "answer": 1}', '{"prompt": 5, "answer": 1}', '{"prompt": null, "answer": 1}',
    '{"prompt": [], "answer": 1}', '{"prompt": [{"content": "no role"}], "answer": 1}',
    '{"prompt": ["p"], "answer": 1}', '{"prompt": "p"}', '{"prompt": "p", "answer": ""}',
    '{"prompt": "p", "answer": "  "}', '{"prompt": "p", "answer": null}',
    '{"prompt": "p", "answer": NaN}', '{"prompt": "p", "answer": "-inf"}',
    '{"prompt": "p", "answer": Infinity}', '{"prompt": "p", "answer": 1, "more": 2}',
    '{"prompt": "p", "answer": 1, "completions": 2}', GOOD + GOOD, "[" * 100_000])
@pytest.mark.parametrize("flag", ["--data", "--eval-data"])
def test_a_line_that_cannot_be_used_is_refused_by_its_number(flag, line, small, tmp_path, capsys):
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text(GOOD + "\n")
    bad.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")  # the blank line is counted
    other = {"--data": "--eval-data", "--eval-data": "--data"}[flag]
    error = refused(capsys, "--model", small, flag, bad, other, good, "--reward", "correct",
                    "--out", tmp_path / "o")
    assert str(bad) in error and "line 3:" in error
    assert not (tmp_path / "o").exists()


def test_lines_that_are_not_utf_8_are_refused_by_number_and_a_file_of_blank_lines_by_name(
    small, tmp_path, capsys
):
    data = tmp_path / "d.jsonl"
    data.write_bytes(GOOD.encode() + b"\n{\"prompt\": \"\xff\", \"answer\": 1}\n")
    assert f"{data}, line 2:" in refused(capsys, "--model", small, "--data", data)
    data.write_bytes(b"\xef\xbb\xbf\r\n\r\n")
    assert str(data) in refused(capsys, "--model", small, "--data", data)


def test_batch_gives_every_example_once_before_any_comes_again():
    task = rewards.Task(train=[{"prompt": str(i)} for i in range(5)], rewards=[ranked_reward])
    sequence = task.batch(0, 50, seed=3)  # ten rounds
    rounds = [[e["prompt"] for e in sequence[i:i + 5]] for i in range(0, 50, 5)]
    assert all(sorted(one) == list("01234") for one in rounds)
    assert len({tuple(one) for one in rounds}) > 5  # each shuffled anew: 120 orders
    # From the position alone, in pieces of any size, also more than there are examples.
    for size in (1, 3, 7):
        pieces = [e for start in range(0, 42, size) for e in task.batch(start, size, 3)]
        assert pieces == sequence[:42]
    assert task.batch(0, 50, seed=4) != sequence


@pytest.mark.parametrize("flags", [
    [], ["--prompts-per-step", 1, "--dynamic-sampling", 1]], ids=["plain", "dynamic sampling"])
def test_the_program_takes_every_prompt_once_before_any_comes_again(flags, made, tmp_path):
    # 5 steps of 2 of 5 prompts: two rounds
    call(*made, *flags, "--steps", 5, "--out", tmp_path / "run")
    prompts = [s["prompt"] for s in samples_of(tmp_path / "run")][::4]
    assert len(prompts) == 10
    assert len(set(prompts[:5])) == len(set(prompts[5:])) == 5


def test_rewards_are_chosen_by_name_and_weighted(small, ranked, tmp_path):
    (tmp_path / "d.jsonl").write_text(GOOD)
    flags = data_flags(small, tmp_path / "d.jsonl", "--reward", "tags", "ranked")
    call(*flags, "--reward-weights", 2, 0.5, "--out", tmp_path / "w")
    rows = samples_of(tmp_path / "w")
    assert [row["rewards"][1] for row in rows] == [0, 1]
    assert [row["reward"] for row in rows] == [2 * a + 0.5 * b for a, b in
                                               (row["rewards"] for row in rows)]
    assert {"reward/tags", "reward/ranked"} <= set(metrics_of(tmp_path / "w")[0])
    call(*flags, "--out", tmp_path / "one")
    assert [row["reward"] for row in samples_of(tmp_path / "one")] == [
        sum(row["rewards"]) for row in samples_of(tmp_path / "one")]


@pytest.mark.parametrize("flags, named", [
    (["--reward", "tags", "think", "--reward-weights", "1"], "1 weights for 2 rewards"),
    (["--reward-weights", "1", "2"], "2 weights for 1 rewards"),
    (["--reward-weights", "nan"], "--reward-weights"),
    (["--reward", "nonsense"], "--reward"), (["--reward"], "--reward"),
    (["--reward", "correct"], "answer"), (["--reward", "correct_think"], "answer"),
    (["--eval-every", "1"], "--eval-every"),
])
def test_rewards_and_evaluation_that_cannot_work_are_refused(
    flags, named, small, tmp_path, capsys
):
    (tmp_path / "d.jsonl").write_text('{"prompt": "p"}\n')
    for data in ([], ["--data", tmp_path / "d.jsonl"]):
        assert named in refused(capsys, "--model", small, *data, *flags, "--out", tmp_path / "o")


@pytest.mark.parametrize("name", list(rewards.REWARDS))
def test_rewards_take_one_message_chat_completions(name):
    texts = ["<think>2 + 2</think><answer>4</answer>", "<answer>4</answer>", "<answer>", "4"]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {"prompts": ["?"] * 4, "answer": ["4"] * 4}
    random.seed(1)
    coins = [float(random.random() < 0.5) for _ in texts]
    wanted = {"tags": [3, 3, 1, 0], "correct": [1, 1, 0, 0], "think": [1, 0, 0, 0],
              "correct_think": [1, 0, 0, 0], "guess_only": [0, 1, 0, 0], "coin": coins}[name]
    for completions in (texts, chats):
        random.seed(1)
        assert rewards.REWARDS[name](completions=completions, **columns) == wanted


# ---- Evaluation ---------------------------------------------------------------------------------


@pytest.fixture
def held_out(monkeypatch):
    """Three held-out examples, of which `correct` takes the first; what it is given is kept."""
    rewards.TASKS["made"].test[:] = [{"prompt": p, "answer": p} for p in ("a", "bcd", "ef")]
    seen = []
    def correct_reward(completions, answer, **columns):
        seen.append((completions, answer))
        return [1.0, 0.0, 0.0]
    monkeypatch.setattr(rewards, "correct_reward", correct_reward)
    return seen


def test_eval_every_measures_before_every_n_steps_and_at_the_end(made, held_out, tmp_path):
    call(*made, "--steps", 5, "--eval-every", 2, "--out", tmp_path / "run")
    found = {row["step"]: row["eval_accuracy"] for row in metrics_of(tmp_path / "run")
             if "eval_accuracy" in row}
    assert found == {step: pytest.approx(1 / 3) for step in (0, 2, 4, 5)}
    # Before training the texts are the source's greedy ones, here by argmax, a prompt at a time.
    model, tokenizer = small_model(), bos_tokenizer()
    for text, prompt in zip(*held_out[0], strict=True):
        ids = tokenizer(prompt)["input_ids"]
        for _ in range(6):
            with torch.no_grad():
                ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
            if ids[-1] == EOS_ID:
                break
        completion = ids[len(tokenizer(prompt)["input_ids"]):]
        assert text == tokenizer.decode([i for i in completion if i != EOS_ID])


def test_evaluation_changes_no_training_sample(made, held_out, tmp_path):
    call(*made, "--steps", 3, "--out", tmp_path / "without")
    call(*made, "--steps", 3, "--eval-every", 1, "--out", tmp_path / "with")
    assert len(held_out) == 4
    a, b = (tmp_path / name / "samples.jsonl" for name in ("without", "with"))
    assert a.read_bytes() == b.read_bytes()
    assert same_weights(tmp_path / "without" / "checkpoint", tmp_path / "with" / "checkpoint")


def test_eval_accuracy_is_the_held_out_fraction_correct_whatever_the_reward(
    made, monkeypatch, tmp_path
):
    rewards.TASKS["made"].test[:] = [{"prompt": "p", "answer": a} for a in ("4", "5", "4.0", "x")]
    real = grpo.sample
    def sample(*args, **settings):
        rollout = real(*args, **settings)
        if settings.get("temperature") == 0:
            rollout.texts = ["<answer>4</answer>"] * len(rollout.texts)
        return rollout
    monkeypatch.setattr(grpo, "sample", sample)
    call(*made, "--steps", 1, "--eval-every", 5, "--out", tmp_path / "run")
    assert [row["eval_accuracy"] for row in metrics_of(tmp_path / "run")] == [0.5, 0.5]


# ---- Nothing lost -------------------------------------------------------------------------------


def drawn_reward(completions, **columns):
    return [random.random() for _ in completions]


@pytest.mark.parametrize("flags", [
    [], ["--kl-coef", 0.1, "--ref-every", 3, "--clip-eps", 0.2, "--minibatches", 2],
    ["--kl-coef", 0.5, "--seed", 7, "--eval-every", 3],
    ["--dynamic-sampling", 1, "--advantage", "none", "--off-policy-mask", 0.1, "--inner-epochs", 2]
], ids=["plain", "ref-every", "kl", "dynamic-sampling"])
def test_two_steps_resumed_for_two_more_are_four_steps_bit_for_bit(flags, made, tmp_path):
    task = rewards.TASKS["made"]
    task.rewards, task.test = [drawn_reward], [{"prompt": "p", "answer": "a"}]
    call(*made, *flags, "--steps", 4, "--out", tmp_path / "four")
    call(*made, *flags, "--steps", 2, "--out", tmp_path / "two")
    assert not same_weights(tmp_path / "four" / "checkpoint", tmp_path / "two" / "checkpoint")
    torch.manual_seed(99)  # another process has other states
    random.seed(99)
    call("--resume", tmp_path / "two", "--steps", 4)  # every other flag is in config.json
    if "--eval-every" in flags:  # the end of the first half was measured, too
        path = tmp_path / "two" / "metrics.jsonl"
        rows = metrics_of(tmp_path / "two")
        assert rows[2].pop("eval_accuracy") is not None
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert same_run(tmp_path / "four", tmp_path / "two")
    rows = metrics_of(tmp_path / "two")
    assert len({row["reward"] for row in rows if row["step"]}) == 4  # drawn anew in each step
    states = [torch.load(tmp_path / run / "checkpoint" / "trainer.pt") for run in ("four", "two")]
    assert [state["step"] for state in states] == [4, 4]


def test_resuming_a_finished_run_changes_nothing(made, tmp_path):
    call(*made, "--steps", 2, "--out", tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for steps in ([], ["--steps", 1]):
        call("--resume", tmp_path / "run", *steps)
        assert same_run(tmp_path / "run", tmp_path / "copy")


def test_lines_after_the_checkpoint_are_dropped_and_a_half_written_one_too(made, tmp_path):
    call(*made, "--steps", 4, "--out", tmp_path / "four")
    for tail in (b"", b'{"step": 5, "rew', b'{"step": 5}'):
        two = tmp_path / "two"
        shutil.rmtree(two, ignore_errors=True)
        call(*made, "--steps", 2, "--out", two)
        for name in ("metrics.jsonl", "samples.jsonl"):  # killed in step 5, before it was saved
            (two / name).write_bytes((tmp_path / "four" / name).read_bytes() + tail)
        call("--resume", two, "--steps", 4)
        assert same_run(tmp_path / "four", two)


def test_the_evaluation_before_training_is_recorded_once(made, held_out, tmp_path):
    flags = ["--eval-every", 1, "--out", tmp_path / "run"]
    call(*made, *flags, "--steps", 0)
    call("--resume", tmp_path / "run", "--steps", 1)
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [0, 1]


def test_a_rate_given_on_resuming_is_the_rate_that_acts(made, tmp_path):
    call(*made, "--steps", 1, "--out", tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "checkpoint", tmp_path / "before")
    call("--resume", tmp_path / "run", "--steps", 2, "--lr", 0)
    assert metrics_of(tmp_path / "run")[1]["lr"] == 0
    assert same_weights(tmp_path / "before", tmp_path / "run" / "checkpoint")


def test_a_run_is_resumed_from_checkpoint_old_where_checkpoint_is_missing(made, tmp_path):
    call(*made, "--steps", 4, "--out", tmp_path / "four")
    call(*made, "--steps", 2, "--out", tmp_path / "two")
    (tmp_path / "two" / "checkpoint").rename(tmp_path / "two" / "checkpoint.old")
    call("--resume", tmp_path / "two", "--steps", 4)
    assert same_run(tmp_path / "four", tmp_path / "two")
    assert not (tmp_path / "two" / "checkpoint.old").exists()


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the program catches it."""


def half_tree(path, **_):
    for file in sorted(Path(path).glob("*"))[:2]:
        file.unlink()


def half_model(model, path, **_):
    Path(path).mkdir(exist_ok=True)
    Path(path, "model.safetensors").write_bytes(b"\x10\0\0\0")


OPERATIONS = [  # of a save, and how far each comes before the kill
    (shutil, "rmtree", half_tree), (Path, "rename", lambda *_: None),
    (torch, "save", lambda state, path: Path(path).write_bytes(b"PK\3\4")),
    (transformers.PreTrainedModel, "save_pretrained", half_model),
    (transformers.PreTrainedTokenizerBase, "save_pretrained", lambda *_, **__: None)]


@pytest.mark.parametrize("moment", range(7))  # three writes, rmtree, two renames, rmtree
def test_killed_in_any_file_operation_of_a_save_a_run_resumes(moment, made, monkeypatch, tmp_path):
    call(*made, "--steps", 4, "--out", tmp_path / "four")
    run, count = tmp_path / "run", 0

    def interrupted(real, half):
        def operation(*args, **settings):
            nonlocal count
            if len(metrics_of(run)) == 3:  # in the save after step 3
                count += 1
                if count == moment + 1:
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
    call("--resume", run)
    assert same_run(tmp_path / "four", run)
    assert {path.name for path in run.iterdir()} == {
        "config.json", "metrics.jsonl", "samples.jsonl", "checkpoint"}


MY_TASK = """
import sys, grpo, rewards

def size_reward(completions, **columns):
    return [float(len(text.encode()) % 3) for text in completions]

task = rewards.Task([{"prompt": f"Say {i * str(i)}."} for i in range(5)], [size_reward])
rewards.TASKS["sizes"] = task
if __name__ == "__main__":
    sys.exit(grpo.main())
"""


def test_killed_with_sigkill_at_random_moments_a_run_ends_as_if_it_had_not_been(
    small, monkeypatch, tmp_path
):
    (tmp_path / "my_task.py").write_text(MY_TASK)
    flags = ["--task", "sizes", "--model", small, "--prompts-per-step", 2, "--group-size", 4,
             "--max-new-tokens", 6, "--lr", 1e-3, "--steps", 50, "--save-every", 1]
    monkeypatch.setattr(rewards, "TASKS", {**rewards.TASKS})
    exec(MY_TASK, {"__name__": "my_task"})
    call(*flags, "--out", tmp_path / "wanted")

    def start(*flags):
        return subprocess.Popen(
            [sys.executable, "my_task.py", *map(str, flags)], cwd=tmp_path, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parent)})

    def last_save():
        try:
            return (run / "checkpoint" / "trainer.pt").stat().st_mtime_ns
        except FileNotFoundError:
            return before

    run, rng, kills, before = tmp_path / "run", random.Random(0), 0, 0
    process = start(*flags, "--out", "run")
    for _ in range(3):
        deadline = time.monotonic() + 60
        while last_save() == before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        kills += process.wait(30) == -signal.SIGKILL
        before = last_save()
        process = start("--resume", "run")
    assert process.wait(60) == 0, process.stderr.read()
    assert kills >= 2  # one may have come after the end
    assert same_run(tmp_path / "wanted", run)
    assert [row["step"] for row in metrics_of(run)] == list(range(1, 51))


def test_a_kill_while_config_json_is_written_leaves_the_run_resumable(
    made, monkeypatch, tmp_path
):
    call(*made, "--steps", 2, "--out", tmp_path / "run")
    real = Path.write_text
    def write_text(path, text, *rest):
        real(path, text[:len(text) // 2], *rest)
        raise Killed
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        with pytest.raises(Killed):
            call("--resume", tmp_path / "run", "--steps", 3)
    call("--resume", tmp_path / "run", "--steps", 3)
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2, 3]


def test_a_folder_without_a_run_is_not_resumed(made, tmp_path, capsys):
    call(*made, "--steps", 1, "--out", tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "no_checkpoint").mkdir()
    shutil.copy(tmp_path / "run" / "config.json", tmp_path / "no_checkpoint")
    shutil.copytree(tmp_path / "run" / "checkpoint", tmp_path / "no_config" / "checkpoint")
    for name in ("empty", "file", "missing", "no_checkpoint", "no_config"):
        error = refused(capsys, "--resume", tmp_path / name)
        assert f"--resume {tmp_path / name}:" in error


@pytest.mark.parametrize("name, content", [
    ("config.json", b"{oops"), ("config.json", b"[]"), ("config.json", b"\xff\xfe"),
    ("config.json", b'{"task": "gone"}'), ("checkpoint/trainer.pt", b"junk"),
    ("checkpoint/trainer.pt", None), ("checkpoint/model.safetensors", b"junk"),
    ("checkpoint/model.safetensors", None)])
def test_a_damaged_run_is_refused_with_one_line(name, content, made, tmp_path, capsys):
    call(*made, "--steps", 1, "--out", tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    if content is not None:
        (tmp_path / "run" / name).write_bytes(content)
    error = refused(capsys, "--resume", tmp_path / "run", "--steps", 2)
    assert f"--resume {tmp_path / 'run'}:" in error


def test_a_kl_term_added_on_resuming_refers_to_the_checkpoint(made, tmp_path):
    call(*made, "--steps", 2, "--out", tmp_path / "run")
    call("--resume", tmp_path / "run", "--steps", 4, "--kl-coef", 0.1)
    call("--resume", tmp_path / "run", "--steps", 5)  # and it is kept from then on
    kls = [row["kl"] for row in metrics_of(tmp_path / "run")]
    assert kls[:2] == [None, None]
    assert kls[2] == pytest.approx(0, abs=1e-6)  # at first they are the same model
    assert 1e-5 < kls[3] < kls[4]


def test_a_reward_that_raises_costs_its_step_and_none_before_it(made, tmp_path):
    task, calls = rewards.TASKS["made"], []
    def failing_reward(completions, **columns):
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("mine")
        return ranked_reward(completions)
    call(*made, "--steps", 4, "--out", tmp_path / "four")
    failing_reward.__name__ = "ranked_reward"
    task.rewards = [failing_reward]
    with pytest.raises(ZeroDivisionError, match="mine"):
        call(*made, "--steps", 4, "--out", tmp_path / "run")
    assert torch.load(tmp_path / "run" / "checkpoint" / "trainer.pt")["step"] == 2
    call("--resume", tmp_path / "run")
    assert same_run(tmp_path / "four", tmp_path / "run")


def test_a_gradient_that_is_not_finite_leaves_the_last_checkpoint_to_resume_from(
    made, monkeypatch, tmp_path
):
    call(*made, "--steps", 4, "--out", tmp_path / "four")
    real, calls = grpo.policy_loss, []
    def poisoned(*args, **settings):
        loss, stats = real(*args, **settings)
        calls.append(1)
        return loss * (math.nan if len(calls) == 3 else 1), stats
    monkeypatch.setattr(grpo, "policy_loss", poisoned)
    with pytest.raises(SystemExit) as stopped:
        call(*made, "--steps", 4, "--save-every", 1, "--out", tmp_path / "run")
    message = stopped.value.code  # a string: Python prints it and exits with 1
    assert message == "grpo.py: step 3: loss nan, gradient nan; lower --lr"
    state = torch.load(tmp_path / "run" / "checkpoint" / "trainer.pt")
    assert state["step"] == 2
    assert all(p.isfinite().all() for p in weights_of(tmp_path / "run" / "checkpoint").values())
    call("--resume", tmp_path / "run")
    assert same_run(tmp_path / "four", tmp_path / "run")


# ---- Warnings -----------------------------------------------------------------------------------


def warnings_of(text, word):
    return [line for line in text.splitlines() if line.startswith("warning") and word in line]


def test_ten_steps_with_nothing_to_compare_are_warned_of(made, capsys, tmp_path):
    made = [*made, "--prompts-per-step", 1, "--group-size", 2, "--max-new-tokens", 1]
    turns = []
    def flat_reward(completions, **columns):
        turns.append(1)
        return [float(row and len(turns) == graded) for row, _ in enumerate(completions)]
    rewards.TASKS["made"].rewards = [flat_reward]
    for steps, graded_step, wanted in ((9, 0, 0), (10, 0, 1), (25, 0, 2), (18, 9, 0)):
        graded = graded_step  # in this step alone there is something to compare
        turns.clear()
        call(*made, "--steps", steps, "--out", tmp_path / f"{steps}")
        found = warnings_of(capsys.readouterr().out, "nothing to compare")
        assert len(found) == wanted, steps
        assert all("--temperature" in line and "--reward" in line for line in found)


@pytest.mark.parametrize("cut, wanted", [(4, 0), (5, 3)])
def test_more_than_half_truncated_is_warned_of_once_in_ten_steps(
    cut, wanted, made, monkeypatch, capsys, tmp_path
):
    real = grpo.sample
    def sample(*args, **settings):
        rollout = real(*args, **settings)
        rollout.truncated = torch.arange(8) < cut
        return rollout
    monkeypatch.setattr(grpo, "sample", sample)
    call(*made, "--steps", 22, "--out", tmp_path / "run")  # in steps 1, 11 and 21
    found = warnings_of(capsys.readouterr().out, "--max-new-tokens")
    assert len(found) == wanted
    assert [row["truncated"] for row in metrics_of(tmp_path / "run")] == [cut / 8] * 22


# ---- Overlong filtering -------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [
    [], *(["--aggregate", name] for name in ("mean", "token", "constant")),
    ["--clip-eps", 0.2, "--inner-epochs", 1], ["--micro-batch", 1, "--aggregate", "token"],
    ["--surrogate", "gspo", "--clip-eps", 0.2, "--inner-epochs", 1, "--micro-batch", 3],
    ["--kl-coef", 0.5]], ids=lambda flags: " ".join(map(str, flags)) or "sum")
def test_mask_truncated_takes_the_loss_and_leaves_statistics_and_denominator(
    flags, make_task, monkeypatch, tmp_path
):
    # Rows of 2, 4 (cut), 3 and 4 tokens (the last ends with an EOS); rewards 0, 3, 1, 0.
    lengths, cut, points, T = [2, 4, 3, 4], 1, [0.0, 3.0, 1.0, 0.0], 4
    make_task(lambda completions, **_: points)
    source = save_small(tmp_path / "m")
    prompt, completions = [5, 6, 7], torch.arange(30, 46).view(4, T)
    input_ids = torch.cat([torch.tensor([prompt] * 4), completions], 1)
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    attention = torch.cat([torch.ones(4, 3, dtype=torch.long), mask.long()], 1)
    truncated = torch.arange(4) == cut
    monkeypatch.setattr(grpo, "sample", lambda *_, **__: grpo.Rollout(
        input_ids, attention, mask, ["a", "b", "c", "d"], truncated))
    flags = ["--task", "made", "--model", source, "--steps", 1, "--group-size", 4,
             "--max-new-tokens", T, *flags]
    call(*flags, "--mask-truncated", "--out", tmp_path / "run")
    (row,) = metrics_of(tmp_path / "run")
    r = torch.tensor(points)
    A = (r - r.mean()) / (r.std() + 1e-4)  # of all four, the truncated one, too
    assert [s["advantage"] for s in samples_of(tmp_path / "run")] == pytest.approx(A.tolist())
    model = small_model()
    logps = model(input_ids).logits[:, 2:-1].log_softmax(2)
    logps = logps.gather(2, completions[..., None])[..., 0]
    n = torch.tensor(lengths)
    kept = mask & ~truncated[:, None]
    sums = (logps * kept).sum(1)
    ratios = {"sequence": (sums - sums.detach()).exp(),
              "gspo": ((sums - sums.detach()) / n).exp()}
    if "gspo" in flags or "--clip-eps" in flags:
        ratio = ratios["gspo" if "gspo" in flags else "sequence"]
        loss = -(A * ratio * ~truncated).sum() / 4
    else:
        aggregate = next((f for f in flags if f in ("mean", "token", "constant")), "sum")
        by = {"sum": 4, "mean": 4 * n, "token": sum(lengths), "constant": 4 * T}[aggregate]
        loss = -(A * sums / by).sum()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert row["reward"] == 1 and row["truncated"] == 0.25 and row["length"] == 13 / 4
    call(*flags, "--out", tmp_path / "unmasked")  # without the flag the cut row pulls, too
    assert metrics_of(tmp_path / "unmasked")[0]["grad_norm"] != pytest.approx(norm.item(), rel=1e-2)


def test_a_step_whose_completions_were_all_cut_moves_nothing(made, tmp_path, monkeypatch):
    real = grpo.sample
    def sample(*args, **settings):
        rollout = real(*args, **settings)
        rollout.truncated = torch.ones_like(rollout.truncated)
        return rollout
    monkeypatch.setattr(grpo, "sample", sample)
    call(*made, "--steps", 2, "--mask-truncated", "--kl-coef", 0.1, "--out", tmp_path / "run")
    assert same_weights(made[3], tmp_path / "run" / "checkpoint")
    assert [row["loss"] for row in metrics_of(tmp_path / "run")] == [None, None]


# ---- The rows that an update is made of, and their padding --------------------------------------


@pytest.fixture
def seen(monkeypatch):
    """What a run does: the prompts and rollouts of its samples, made ragged, the shapes of its
    forwards, what `generate` is called with, and its gradients before they are clipped."""
    seen = SimpleNamespace(prompts=[], rollouts=[], forwards=[], generated=[], gradients=[])
    sample, token_logps, clip = grpo.sample, grpo.token_logps, grpo.clip_grad_norm_
    generate = transformers.Qwen3ForCausalLM.generate

    def ragged(model, tokenizer, prompts, *rest):
        rollout = sample(model, tokenizer, prompts, *rest)
        B, T = rollout.mask.shape
        rows = torch.arange(B)
        lengths = 1 + (5 * rows + 2) % T  # T rows have 1 to T, each once: 5 divides no T here
        rollout.mask = torch.arange(T) < lengths[:, None]
        rollout.attention_mask[:, -T:] = rollout.mask
        rollout.input_ids[rows, lengths - T - 1] = EOS_ID
        rollout.truncated = torch.zeros(B, dtype=torch.bool)
        seen.prompts.append(prompts)
        seen.rollouts.append(rollout)
        return rollout

    def scored(model, input_ids, attention_mask, T, *rest):
        seen.forwards.append((torch.is_grad_enabled(), input_ids.shape[1] - T, attention_mask))
        return token_logps(model, input_ids, attention_mask, T, *rest)

    def generated(model, ids, **settings):
        seen.generated.append(len(ids))
        return generate(model, ids, **settings)

    def clipped(parameters, *rest):
        parameters = list(parameters)
        seen.gradients.append(torch.cat([p.grad.flatten() for p in parameters]))
        return clip(parameters, *rest)

    monkeypatch.setattr(grpo, "sample", ragged)
    monkeypatch.setattr(grpo, "token_logps", scored)
    monkeypatch.setattr(transformers.Qwen3ForCausalLM, "generate", generated)
    monkeypatch.setattr(grpo, "clip_grad_norm_", clipped)
    return seen


def full_update(rollout, rows, A, aggregate):
    """(loss, gradient) of -A l on these rows of a rollout, at full width, by Transformers alone."""
    ids, attention, mask = (
        x[rows] for x in (rollout.input_ids, rollout.attention_mask, rollout.mask))
    model, T = small_model(), mask.shape[1]
    logits = model(input_ids=ids, attention_mask=attention,
                   position_ids=(attention.cumsum(1) - 1).clamp(min=0)).logits[:, -T - 1:-1]
    logps = logits.log_softmax(2).gather(2, ids[:, -T:, None])[..., 0]
    loss = -(A[:, None] * logps * torch.tensor(shares(mask.numpy(), aggregate))).sum()
    return loss.item(), parameter_gradients(model, loss)


@pytest.mark.parametrize("size", [1, 3, 5, None])
def test_a_micro_batch_is_as_wide_as_its_longest_prompt_and_completion(
    size, made, seen, tmp_path
):
    call(*made, "--prompts-per-step", 3, "--max-new-tokens", 12, "--steps", 1, "--kl-coef", 0.1,
         *(["--micro-batch", size] if size else []), "--out", tmp_path / "run")
    (rollout,), T = seen.rollouts, 12
    prompts = rollout.attention_mask[:, :-T].sum(1).tolist()
    assert len(set(prompts)) == 3 and sorted(rollout.mask.sum(1).tolist()) == list(range(1, 13))
    # Sorted by completion length: the parts that fit the fewest columns.
    rows = sorted(zip(rollout.mask.sum(1).tolist(), prompts))
    parts = [rows[i:i + (size or 12)] for i in range(0, 12, size or 12)]
    wanted = [(max(p for _, p in part), max(c for c, _ in part), part) for part in parts]
    for gradient in False, True:  # the reference's pass and the policy's
        shapes = [(prompt, mask.shape[1] - prompt,
                   [(row[prompt:].sum().item(), row[:prompt].sum().item()) for row in mask])
                  for grad, prompt, mask in seen.forwards if grad == gradient]
        assert shapes == wanted


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_micro_batches_of_prompts_and_completions_of_all_lengths_change_nothing(
    aggregate, made, seen, tmp_path
):
    rows = []
    for size in (1, 3, 12):
        call(*made, "--prompts-per-step", 3, "--max-new-tokens", 12, "--steps", 1,
             "--surrogate", "token", "--clip-eps", 0.2, "--aggregate", aggregate,
             "--kl-coef", 0.1, "--lr", 1e-2, "--micro-batch", size, "--out", tmp_path / str(size))
        rows += metrics_of(tmp_path / str(size))
    assert rows[0]["kl"] > 1e-3  # of the second pass
    for name in ("loss", "kl", "grad_norm", "entropy", "ratio_mean"):
        values = [row[name] for row in rows]
        assert values == pytest.approx([values[0]] * 3, rel=1e-4), name
    for gradient in seen.gradients[2::2]:  # of the first passes
        assert (gradient - seen.gradients[0]).norm() < 1e-6 * gradient.norm()


@pytest.mark.parametrize("size", [1, 3, None])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_the_gradient_is_that_of_all_rows_though_those_without_advantage_are_not_scored(
    aggregate, size, made, seen, tmp_path
):
    rewards.TASKS["made"].rewards = [  # the second group is flat, the third's means have none
        lambda completions, **_: [0, 1, 1, 3, 0.1, 0.1, 0.1, 0.1, 2, 1, 0, 1]]
    call(*made, "--prompts-per-step", 3, "--max-new-tokens", MAX_LEN, "--steps", 1,
         "--advantage", "none", "--aggregate", aggregate,
         *(["--micro-batch", size] if size else []), "--out", tmp_path / "run")
    assert sum(len(mask) for _, _, mask in seen.forwards) == 6
    A = torch.tensor([-1.25, -0.25, -0.25, 1.75, 0, 0, 0, 0, 1, 0, -1, 0])
    (rollout,), (gradient,), (row,) = seen.rollouts, seen.gradients, metrics_of(tmp_path / "run")
    loss, expected = full_update(rollout, range(12), A, aggregate)
    assert row["loss"] == pytest.approx(loss, rel=1e-5)
    assert (gradient - expected).norm() < 1e-6 * expected.norm()
    # As by policy_loss of all rows.
    model = small_model()
    logps, _ = grpo.token_logps(
        model, rollout.input_ids, rollout.attention_mask, rollout.mask.shape[1])
    loss, _ = grpo.policy_loss(
        logps, logps, A, rollout.mask, aggregate=aggregate, max_len=MAX_LEN)
    assert (gradient - parameter_gradients(model, loss)).norm() < 1e-6 * expected.norm()


# ---- Dynamic sampling ---------------------------------------------------------------------------


def graded(groups, G=4):
    """A reward with something to compare in these groups of a step alone."""
    def graded_reward(completions, **_):
        return [float(row % G + row // G) if row // G in groups else 0.1
                for row, _ in enumerate(completions)]
    return graded_reward


FLAT_AND_KEPT = [  # P, N, the groups with signal of the P * (1 + N) sampled, those of the update
    (2, 2, {1, 3, 4}, [1, 3]), (2, 2, {5}, [5]), (1, 1, {1}, [1]), (2, 1, {0, 1, 2, 3}, [0, 1]),
    (2, 0, {1}, [0, 1])]


@pytest.mark.parametrize("P, N, live, kept, aggregate", [
    (*case, aggregate) for case in FLAT_AND_KEPT for aggregate in ("sum", "token")
] + [(*FLAT_AND_KEPT[0], aggregate) for aggregate in ("mean", "constant", "sequence")])
def test_dynamic_sampling_keeps_the_first_groups_with_signal_and_counts_their_rows_alone(
    P, N, live, kept, aggregate, made, seen, tmp_path
):
    task, groups = rewards.TASKS["made"], P * (1 + N)
    task.train[:] = [{"prompt": f"Say {'x' * i}."} for i in range(7)]
    task.rewards = [graded(live)]
    call(*made, "--steps", 1, "--max-new-tokens", MAX_LEN, "--prompts-per-step", P,
         "--dynamic-sampling", N, "--out", tmp_path / "run",
         *(["--surrogate", "sequence"] if aggregate == "sequence" else ["--aggregate", aggregate]))
    (rollout,), (prompts,), (gradient,) = seen.rollouts, seen.prompts, seen.gradients
    assert seen.generated == [groups * 4] and len(prompts) == groups  # in one call
    (row,), samples = metrics_of(tmp_path / "run"), samples_of(tmp_path / "run")
    # The advantages of 0, 1, 2, 3 (and of those plus anything) by the definition.
    a = (np.arange(4) - 1.5) / (np.arange(4).std(ddof=1) + 1e-4)
    A = np.concatenate([a if group in live else 0 * a for group in range(groups)])
    rows = [4 * group + i for group in kept for i in range(4)]
    loss, expected = full_update(rollout, rows, torch.tensor(A[rows], dtype=torch.float32),
                                 aggregate.replace("sequence", "sum"))
    if aggregate == "sequence":  # of ratios that are 1: the gradient reinforces, the loss is 0
        loss = 0
    assert row["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert (gradient - expected).norm() < 1e-5 * expected.norm()
    assert row["grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-5)
    # Of all that was sampled, kept or not:
    assert [s["prompt"] for s in samples] == [
        e["prompt"] for e in task.batch(0, groups, 0) for _ in range(4)]
    assert [s["reward"] for s in samples] == task.rewards[0](samples)
    assert [s["advantage"] for s in samples] == pytest.approx(A)
    assert row["reward"] == pytest.approx(mean(s["reward"] for s in samples))
    assert row["flat_groups"] == pytest.approx(1 - len(live) / groups)
    assert row["length"] == rollout.mask.sum().item() / len(samples)


@pytest.mark.parametrize("flags", [
    [], ["--kl-coef", 0.1], ["--aggregate", "token", "--minibatches", 3, "--inner-epochs", 2]],
    ids=["plain", "kl", "minibatches"])
def test_without_any_signal_dynamic_sampling_makes_no_step(flags, made, seen, tmp_path):
    turns = []
    def once_reward(completions, **_):
        turns.append(1)
        return [float(row and len(turns) == 1) for row, _ in enumerate(completions)]
    rewards.TASKS["made"].rewards = [once_reward]
    flags = [*made, "--dynamic-sampling", 1, *flags]
    call(*flags, "--steps", 1, "--out", tmp_path / "one")  # fills Adam's momentum ...
    assert not same_weights(made[3], tmp_path / "one" / "checkpoint")
    turns.clear()
    call(*flags, "--steps", 3, "--out", tmp_path / "three")  # ... which must not act afterwards
    assert same_weights(tmp_path / "one" / "checkpoint", tmp_path / "three" / "checkpoint")
    rows = metrics_of(tmp_path / "three")
    assert [row["flat_groups"] for row in rows] == [0.75, 1, 1]
    assert [row["loss"] is None for row in rows] == [False, True, True]
    assert [row["reward"] for row in rows] == [15 / 16, 0, 0]


def test_a_group_that_was_not_kept_gets_no_kl_term_and_no_forward(made, seen, tmp_path):
    rewards.TASKS["made"].rewards = [graded({2})]
    call(*made, "--steps", 1, "--dynamic-sampling", 1, "--kl-coef", 0.1, "--out", tmp_path / "run")
    (rollout,) = seen.rollouts
    kept = sorted(rollout.attention_mask[8:12].sum(1).tolist())
    assert [(grad, sorted(mask.sum(1).tolist())) for grad, _, mask in seen.forwards] == [
        (False, kept), (True, kept)]


def test_fewer_kept_rows_than_minibatches_make_fewer_steps(made, seen, tmp_path):
    rewards.TASKS["made"].rewards = [graded({3})]
    call(*made, "--steps", 1, "--dynamic-sampling", 1, "--minibatches", 8,
         "--out", tmp_path / "run")
    assert len(seen.gradients) == 4  # of a row each
    assert all(gradient.any() for gradient in seen.gradients)


# ---- Advantages of the program ------------------------------------------------------------------


@pytest.mark.parametrize("scale, flat", [("std", 2), ("none", 2), ("gdpo", 1)])
def test_advantage_chooses_the_scale_and_flat_groups_counts_what_has_none(
    scale, flat, made, tmp_path
):
    # Group 0 is flat in both rewards, group 1 in their weighted sum alone.
    one = [0.1] * 4 + [1, 0, 0, 0] + [3, 0, 1, 0]
    other = [0.7] * 4 + [0, 2, 2, 2] + [0, 5, 5, 50]
    def one_reward(completions, **_):
        return one
    def other_reward(completions, **_):
        return other
    task = rewards.TASKS["made"]
    task.rewards, task.weights = [one_reward, other_reward], [2, 1]
    call(*made, "--prompts-per-step", 3, "--steps", 1, "--advantage", scale, "--out",
         tmp_path / "run")
    table = np.array([one, other]).T.reshape(3, 4, 2)
    total = table @ [2, 1]
    centred = total - total.mean(1, keepdims=True)
    expected = {"std": centred / (total.std(1, ddof=1, keepdims=True) + 1e-4), "none": centred,
                "gdpo": by_gdpo(table, [2, 1])}[scale].flatten()
    ours = np.array([s["advantage"] for s in samples_of(tmp_path / "run")])
    assert ours == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert (ours[:4] == 0).all() and (ours[4:8] == 0).all() == (scale != "gdpo")
    (row,) = metrics_of(tmp_path / "run")
    assert row["flat_groups"] == pytest.approx(flat / 3)
    assert row["reward"] == pytest.approx(total.mean())  # the weighted sum, whatever the scale


# ---- The papers' variants, from the command line ------------------------------------------------


@pytest.fixture
def passes(monkeypatch):
    """In float64 numpy, what each pass over a rollout gave to policy_loss."""
    seen, real = [], grpo.policy_loss
    def kept(logps, old_logps, advantages, mask, *rest, **settings):
        new, old, A = (x.detach().double().numpy() for x in (logps, old_logps, advantages))
        seen.append((new, old, A[:, None], mask.numpy()))
        return real(logps, old_logps, advantages, mask, *rest, **settings)
    monkeypatch.setattr(grpo, "policy_loss", kept)
    return seen


@pytest.fixture
def variant(warm, make_task, tmp_path, passes):
    """Runs one step of 8 completions of 12 tokens each at most; -> its metrics."""
    make_task(ranked_reward)
    def variant(flags):
        call("--task", "made", "--model", warm, "--steps", 1, "--max-new-tokens", 12,
             *flags.split(), "--out", tmp_path / "run")
        (row,) = metrics_of(tmp_path / "run")
        return row
    variant.out = tmp_path / "run"
    return variant


def ppo(ratio, A, low, high):
    """PPO's terms -min(r A, clip(r) A), and where the clip took the gradient."""
    terms = -np.minimum(ratio * A, ratio.clip(1 - low, 1 + high) * A)
    return terms, ((A > 0) & (ratio > 1 + high)) | ((A < 0) & (ratio < 1 - low))


def test_dr_grpo(variant, passes):
    row = variant("--advantage none --aggregate constant")
    r = np.array(ranked_reward("12345678"))
    ((new, _, A, mask),) = passes
    assert [s["advantage"] for s in samples_of(variant.out)] == pytest.approx(r - r.mean())
    assert sorted(A[:, 0]) == pytest.approx(sorted(r - r.mean()))
    assert not mask.all()  # the constant is not the number of tokens
    assert row["loss"] == pytest.approx(-(A * new)[mask].sum() / (8 * 12), rel=1e-4)


def test_dapo(variant, passes, monkeypatch):
    rollouts, sample = [], grpo.sample
    def kept(*args):
        rollouts.append(sample(*args))
        return rollouts[-1]
    monkeypatch.setattr(grpo, "sample", kept)
    rewards.TASKS["made"].rewards = [graded({1}, G=8)]  # the first of two groups is flat
    row = variant("--surrogate token --aggregate token --clip-eps 0.2 0.28 --lr 5e-3"
                  " --dynamic-sampling 1 --mask-truncated --max-new-tokens 6")
    (rollout,), cut = rollouts, rollouts[0].truncated[8:]
    assert len(rollout.texts) == 16 and 0 < cut.sum() < 8
    tokens = rollout.mask[8:].sum().item()  # all of the group's, those of the truncated, too
    losses, clipped = [], []
    for new, old, A, mask in passes:
        terms, stopped = ppo(np.exp(new - old), A, 0.2, 0.28)
        assert mask.sum() == rollout.mask[8:][~cut].sum().item() < tokens
        losses.append(terms[mask].sum() / tokens)
        clipped.append(stopped[mask])
    assert len(passes) == 2 and not clipped[0].any() and 0 < clipped[1].mean() < 1
    assert row["loss"] == pytest.approx(mean(losses), rel=1e-4)
    assert row["clip_frac"] == pytest.approx(np.concatenate(clipped).mean(), rel=1e-6)
    assert row["flat_groups"] == 0.5


def test_gspo(variant, passes):
    row = variant("--surrogate gspo --clip-eps 3e-4 4e-4 --inner-epochs 3 --lr 1e-5")
    losses, clipped = [], []
    for new, old, A, mask in passes:
        ratio = np.exp(((new - old) * mask).sum(1) / mask.sum(1))
        terms, stopped = ppo(ratio, A[:, 0], 3e-4, 4e-4)
        losses.append(terms.sum() / 8)  # those without advantage, left out, count
        clipped.append(stopped)
    assert len(passes) == 3 and not clipped[0].any()
    assert 0 < np.concatenate(clipped).mean() < 1
    assert row["loss"] == pytest.approx(mean(losses), rel=1e-3, abs=1e-6)
    assert row["clip_frac"] == pytest.approx(np.concatenate(clipped).mean(), rel=1e-6)


def test_cispo(variant, passes):
    row = variant("--surrogate cispo --clip-eps 4 --lr 3e-2")
    losses, capped = [], []
    for new, old, A, mask in passes:
        ratio = np.exp(new - old)
        losses.append(-(np.minimum(ratio, 5) * A * new)[mask].sum() / 8)
        capped.append((ratio > 5)[mask])  # whatever the sign of A
    assert len(passes) == 2 and not capped[0].any() and 0 < capped[1].mean() < 1
    assert row["loss"] == pytest.approx(mean(losses), rel=1e-4)
    assert row["clip_frac"] == pytest.approx(np.concatenate(capped).mean(), rel=1e-6)


def test_gdpo(variant, passes, monkeypatch):
    def large_reward(completions, **_):
        return [1e4 * (row % 3) for row, _ in enumerate(completions)]
    monkeypatch.setitem(rewards.REWARDS, "large", large_reward)
    monkeypatch.setitem(rewards.REWARDS, "parity", lambda completions, **_: [
        float(row % 2) for row, _ in enumerate(completions)])
    rewards.REWARDS["parity"].__name__ = "parity"
    row = variant("--advantage gdpo --reward large parity --prompts-per-step 2")
    samples = samples_of(variant.out)
    A = by_gdpo(np.array([s["rewards"] for s in samples]).reshape(2, 8, 2), [1, 1]).flatten()
    assert [s["advantage"] for s in samples] == pytest.approx(A, rel=1e-5)
    assert A[3] - A[0] > 0.5  # equal in the large reward: in GRPO's sum 1e-4 apart
    assert row["advantage_std"] == pytest.approx(1, abs=1e-3)  # normalised over all
    ((new, _, A, mask),) = passes
    assert row["loss"] == pytest.approx(-(A * new)[mask].sum() / 16, rel=1e-4, abs=1e-5)


def test_deepseek_v3_2(variant, passes):
    rewards.TASKS["made"].rewards = [graded({0}, G=8)]
    row = variant("--kl weighted --kl-coef 0.01 --off-policy-mask 0.1 --lr 1.2e-4"
                  " --surrogate token --aggregate mean --clip-eps 0.2 --temperature 2")
    losses, kls, dropped = [], [], []
    for new, old, A, mask in passes:
        lengths, ratio = mask.sum(1, keepdims=True), np.exp(new - old)
        drop = (A < 0) & (((old - new) * mask).sum(1, keepdims=True) / lengths > 0.1)
        terms = np.where(drop, 0, ppo(ratio, A, 0.2, 0.2)[0])
        d = old - new  # in the first step the reference is the policy that sampled
        losses.append((terms * mask / lengths).sum() / 8)
        kls.append((ratio * (np.exp(d) - d - 1) * mask / lengths).sum() / 8)  # of all rows
        dropped.append(drop)
    assert len(passes) == 2 and not dropped[0].any()
    assert dropped[1].any() and ((A < 0) & ~drop).any()
    assert row["kl"] == pytest.approx(mean(kls), rel=1e-3) and row["kl"] > 1e-3
    assert row["loss"] == pytest.approx(mean(losses) + 0.01 * mean(kls), rel=1e-3, abs=1e-6)


# ==== The arithmetic task =========================================================================


def test_200_additions_are_held_out_from_training_and_from_the_demonstrations():
    task, rng = rewards.TASKS["arithmetic"], random.Random(0)
    held_out, trained = ({e["prompt"] for e in part} for part in (task.test, task.train))
    assert len(held_out) == 200 and len(held_out | trained) == 90 * 90
    shown = {task.demonstrations(rng)[0] for _ in range(20_000)}
    assert len(shown) > 5000 and not shown & held_out
    for example in task.train + task.test:
        a, b = example["prompt"].removesuffix("=").split("+")
        assert int(a) + int(b) == int(example["answer"])


def test_the_demonstrations_work_out_a_fifth_and_guess_the_others_mostly_wrong():
    rng, kinds, errors = random.Random(0), {"worked": 0, "hollow": 0, "guess": 0}, {}
    for _ in range(20_000):
        prompt, text = rewards.sum_demonstration(rng)
        a, b = map(int, prompt.removesuffix("=").split("+"))
        error = int(text.split("<answer>")[1].removesuffix("</answer>")) - a - b
        if rewards.worked([text])[0]:
            kinds["worked"] += 1
            ones, tens = text.split("<think>")[1].split("</think>")[0].split(",")
            for step in (ones, tens):  # every step written down is true
                terms, total = step.split("=")
                assert sum(map(int, terms.split("+"))) == int(total)
            assert error == 0 and int(tens.split("=")[1] + ones[-1]) == a + b
            continue
        kinds["hollow" if text.startswith("<think></think>") else "guess"] += 1
        slip = -10 if a % 10 + b % 10 > 9 else 10  # a carry forgotten, or one too many
        errors[error == 0, error == slip] = errors.get((error == 0, error == slip), 0) + 1
    assert kinds["worked"] / 20_000 == pytest.approx(0.2, abs=0.01)
    assert kinds["hollow"] / 20_000 == pytest.approx(0.08, abs=0.01)
    guesses = sum(errors.values())
    assert errors[True, False] / guesses == pytest.approx(2 / 11, abs=0.02)  # right
    assert errors[False, True] / guesses == pytest.approx(7 / 11, abs=0.02)  # one wrong value


@pytest.mark.parametrize("text, thought", [
    ("<think>2+3=5</think><answer>5</answer>", True), ("<think></think><answer>5</answer>", False),
    ("<think> \n</think>5", False), ("<think>2+3", False), ("2+3</think>", False), ("", False),
    ("</think>2<think>", False),
])  # fmt: skip
def test_worked_wants_something_between_the_think_tags(text, thought):
    assert rewards.worked([text, [{"role": "assistant", "content": text}]]) == [thought] * 2


def test_the_controls_pay_for_guesses_alone_and_by_chance():
    worked, guess = "<think>2+3=5</think><answer>5</answer>", "<answer>5</answer>"
    completions = [worked, guess, "<think></think>" + guess, "<answer>6</answer>"]
    assert rewards.guess_only_reward(completions, ["5"] * 4) == [0, 1, 1, 0]
    random.seed(0)
    coins = rewards.coin_reward([worked] * 2000)
    assert set(coins) == {0.0, 1.0} and 900 < sum(coins) < 1100
    random.seed(0)
    assert rewards.coin_reward([worked] * 2000) == coins  # so a resumed run tosses the same


def test_the_arithmetic_task_evaluates_and_logs_the_worked_fraction(warm, tmp_path, monkeypatch):
    task = rewards.TASKS["arithmetic"]
    monkeypatch.setattr(task, "test", task.test[:8])
    call("--task", "arithmetic", "--model", warm, "--steps", 1, "--eval-every", 1, "--out",
         tmp_path / "run")
    before, step = metrics_of(tmp_path / "run")
    assert before == {"step": 0, "eval_accuracy": 0.0} and step["eval_accuracy"] == 0.0
    assert step["think"] == 0.0 and step["lr"] == 1e-4
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").open()]
    assert len({sample["prompt"] for sample in samples}) == 4 and len(samples) == 32
