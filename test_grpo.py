# SPDX-License-Identifier: MIT
"""python -m pytest: every number that the two books print, the mathematics, the program.

Expected values are printed by a source named beside them, or computed here in numpy from the
definitions, never by the code under test.
"""

import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import grpo
import rewards

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
    np.float64(1), np.ones(3), torch.tensor(1.0), torch.ones(1)], ids=lambda wrong: repr(wrong))
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
    names = """step reward reward_std reward/tags advantage_std flat_groups loss kl grad_norm ratio_mean
        ratio_max clip_frac entropy length length_max truncated lr tokens_per_s seconds seconds_sample
        seconds_update""".split()
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


def test_same_seed_same_metrics_from_tiny_and_from_its_saved_warm_start(default_run, warm, tmp_path):
    # One test for three promises: the seed decides everything but times; the warm start is
    # reproducible to the byte; and its checkpoint, loaded as a directory, resolves the same rate.
    run("--model", warm, "--out", "again", "--steps", 40, cwd=tmp_path)
    again = without_times(metrics_of(tmp_path / "again"))
    assert again == without_times(metrics_of(default_run[0]))[:40]


def test_another_seed_gives_another_run(default_run, warm, tmp_path):
    call("--model", warm, "--out", tmp_path / "other", "--steps", 2, "--seed", 1)
    other = metrics_of(tmp_path / "other")
    assert [row["entropy"] for row in other] != [r["entropy"] for r in metrics_of(default_run[0])[:2]]


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
]  # fmt: skip


@pytest.mark.parametrize("flag, value", REFUSED)
def test_a_flag_that_cannot_work_costs_one_line_and_status_2(flag, value, capsys, monkeypatch, tmp_path):
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
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(PROGRAM.parent)})
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
        for aggregate in grpo.AGGREGATES:
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
def test_no_forward_pass_repeats_an_earlier_one(flags, wanted, warm, make_task, tmp_path, monkeypatch):
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
            for s in grpo.SURROGATES]
    runs += [["--kl", k, "--kl-coef", 0.1, "--prompts-per-step", 2] for k in grpo.KL_ESTIMATORS]
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
    code = re.search(r"```python\n(# my_task\.py\n.*?)```", readme, re.S).group(1)
    (tmp_path / "my_task.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "my_task.py", "--task", "short", "--model", str(warm), "--steps", "3",
         "--out", "run"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parent), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "reward/short" in metrics_of(tmp_path / "run")[-1]
