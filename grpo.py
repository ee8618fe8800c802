# SPDX-License-Identifier: MIT
"""GRPO (Group Relative Policy Optimization) in one file, to be read from the top and then run.

    python grpo.py                   a model learns to write answer tags, in a minute on a CPU
    python grpo.py --clip-eps 10     the same with a clipped policy ratio; rollouts are used twice

Part I is the algorithm, Part II the program around it. A training step, in the file's order:
    1. sample            G completions of one prompt, drawn from the policy: the group
    2. rewards.score     a program gives each completion a number
    3. group_advantages  how much better than its group is each completion?
    4. token_logps       the log-probability of every sampled token under the policy
    5. policy_loss       makes the better ones likelier; kl_loss holds the policy near a reference
    6. grpo_step         all of it: backward, clip the gradient norm, AdamW; then sample again
Departures from the two books (README: "Where the sources and the arithmetic part ways"):
  - The clip is PPO's min(r A, clip(r) A), on both sides; the second book's code clips above only.
  - With a clip a rollout is used twice (the first book's reuse); the second book samples anew.
  - Samples and log-probabilities are of one temperature; in the second book, of 0.8 and of 1.
  - An update without signal or KL term is skipped: under Adam, momentum alone would move weights.
  - A KL term (--kl-coef) is k3. The second book's, k1, has a gradient without the reference in it.
  - Weights are float32 (autocast to bf16 on CUDA): bf16 weights round most steps of 1e-5 away.
Shapes: P prompts of L tokens, G completions each of T, B = P*G rows, V vocabulary, K rewards."""

import argparse
import contextlib
import copy
import json
import math
import random
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import rewards


# ==== 1. Sample: a group of completions for each prompt, each ending at its first EOS ===========
@dataclass
class Rollout:
    """What the policy wrote, as token ids. The texts are for rewards and never encoded again."""
    input_ids: Tensor  # (B, L+T) prompts padded on the left, completions on the right
    attention_mask: Tensor  # (B, L+T) 1 for real tokens
    mask: Tensor  # (B, T) bool: completion tokens up to and including the first EOS
    texts: list[str]  # B completions, without the EOS
    truncated: Tensor  # (B,) bool: stopped by max_new_tokens, not by an EOS


def completion_mask(completion_ids: Tensor, eos_ids) -> Tensor:
    """(B, T) bool: True up to and including the first EOS (one id or several), else all True. Going
    by EOS, not by padding, trains the real EOS where pad is EOS, too. (First book.)"""
    eos_ids = [eos_ids] if isinstance(eos_ids, int) else list(eos_ids)
    is_eos = torch.isin(completion_ids, completion_ids.new_tensor(eos_ids))
    return is_eos.cumsum(1) - is_eos.long() == 0  # no EOS strictly before this position


@contextlib.contextmanager
def eval_mode(model):
    """Sampling and training see the same network: no dropout; on CUDA, bf16 autocast."""
    training, device = model.training, model.device.type
    model.eval()
    try:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            yield
    finally:
        model.train(training)


def sample(
    model, tokenizer, prompts, group_size: int, max_new_tokens: int, temperature=1.0, top_p=1.0
) -> Rollout:
    """Draw group_size completions of each prompt (text or token ids), in adjacent rows; temperature
    0 is greedy. The model's own generation config (top_k, repetition penalty, ...) is set aside but
    for its EOS ids: `generate` shall draw from token_logps' distribution (top_p < 1 does not)."""
    prompts = [tokenizer(p).input_ids if isinstance(p, str) else p for p in prompts]
    rows = [ids for ids in prompts for _ in range(group_size)]
    prompt_ids, prompt_mask = pad_rows(rows, "left", model.device)  # (B, L)
    own_config = model.generation_config
    own_eos = np.atleast_1d(own_config.eos_token_id).tolist()  # it is None, an int or a list
    eos_ids = sorted({tokenizer.eos_token_id, *own_eos} - {None})
    model.generation_config = GenerationConfig(eos_token_id=eos_ids or None, pad_token_id=0)
    try:
        with eval_mode(model), torch.inference_mode():  # faster than no_grad
            input_ids = model.generate(
                prompt_ids, attention_mask=prompt_mask, max_new_tokens=max_new_tokens, top_k=0,
                do_sample=temperature > 0, temperature=temperature or 1.0, top_p=top_p)  # (B, L+T)
    finally:
        model.generation_config = own_config
    input_ids = input_ids.clone()  # what inference_mode made cannot take part in a gradient
    completion_ids = input_ids[:, prompt_ids.shape[1]:]  # (B, T)
    mask = completion_mask(completion_ids, eos_ids)
    is_eos = torch.isin(completion_ids, completion_ids.new_tensor(eos_ids))
    texts = [tokenizer.decode(ids[keep]) for ids, keep in zip(completion_ids, mask & ~is_eos)]
    attention_mask = torch.cat([prompt_mask, mask.long()], 1)
    return Rollout(input_ids, attention_mask, mask, texts, truncated=~is_eos.any(1))


# ==== 2. Reward (rewards.score, in rewards.py) and 3. Compare: the group is its own baseline ====
def group_advantages(rewards: Tensor, scale="std", eps=1e-4, size=None) -> Tensor:
    """How much better than its group each completion is: rewards (P, G) -> advantages (P, G).
    "std":  (r - mean) / (std + eps), the std unbiased (the first book's code; DeepSeekMath)
    "none": r - mean (Dr. GRPO)
    Exactly 0 where a group's rewards differ by rounding alone, at most 16 float32 ulps of the
    largest |r|, or `size` (P, G), a sum's |parts|: Adam would make a full step of rounding."""
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be (P, G) with G at least 2, not {tuple(rewards.shape)}")
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))  # ints have no mean
    advantages = rewards - rewards.mean(1, keepdim=True)
    if scale == "std":
        advantages = advantages / (rewards.std(1, keepdim=True) + eps)
    elif scale != "none":
        raise ValueError(f"no scale {scale!r}: std or none")
    size = rewards.abs() if size is None else size
    spread = rewards.amax(1, keepdim=True) - rewards.amin(1, keepdim=True)  # (P, 1)
    return advantages.masked_fill(spread <= 16 * 2**-23 * size.amax(1, keepdim=True), 0.0)


def gdpo_advantages(rewards: Tensor, weights, eps=1e-4) -> Tensor:
    """GDPO: each of K rewards is normalised in its group before they are added, so that none drowns
    the others. rewards (P, G, K) -> (P, G): x = sum of weights[k] * A_k, then x / (std + eps) over
    all P*G (its mean is 0); flat groups stay 0. A reward that is NaN does not apply to its row."""
    parts = []
    for reward, weight in zip(rewards.double().unbind(2), weights, strict=True):
        mean = reward.nanmean(1, keepdim=True)
        reward = torch.where(reward.isnan(), mean, reward).nan_to_num()  # at the mean: A = 0
        parts.append(weight * group_advantages(reward, eps=eps))  # (P, G)
    x = group_advantages(sum(parts), "none", size=sum(part.abs() for part in parts))
    return x / (x.std() + eps)


# ==== 4. Log-probabilities: of exactly the sampled tokens, under the policy =====================
def token_logps(
    model, input_ids: Tensor, attention_mask: Tensor, completion_len: int, temperature=1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability l of each of the last completion_len tokens, and the entropy (nats) there.
    l_t = z_t[token_t] - logsumexp(z_t), z = logits / the sampler's temperature. input_ids,
    attention_mask (B, L+T), padded left -> both float32 (B, T); gradients flow through l alone."""
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)  # padding takes no position
    with eval_mode(model):
        logits = model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            use_cache=False, logits_to_keep=completion_len + 1).logits
    # Logits predict the next token: the prompt's last position scores the first completion token.
    logits = logits[:, -completion_len - 1:-1].float() / temperature  # (B, T, V)
    tokens = input_ids[:, -completion_len:].unsqueeze(2)  # (B, T, 1)
    logps = logits.gather(2, tokens).squeeze(2) - logits.logsumexp(2)
    entropy = torch.special.entr(logits.detach().softmax(2)).sum(2)
    return logps, entropy


def rollout_logps(model, rollout: Rollout, rows, temperature) -> tuple[Tensor, ...]:
    """token_logps of these rows of a rollout, both (len(rows), T), 0 after the last column that is
    True in any of their masks. A mask may have holes (another sampler's tool outputs)."""
    ids, attention_mask = rollout.input_ids[rows], rollout.attention_mask[rows]
    T = rollout.mask.shape[1]
    width = int(rollout.mask[rows].any(0).nonzero().max()) + 1
    start = int(attention_mask.any(0).nonzero().min())  # of the longest prompt
    part = slice(start, ids.shape[1] - T + width)
    scored = token_logps(model, ids[:, part], attention_mask[:, part], width, temperature)
    return tuple(torch.nn.functional.pad(x, (0, T - width)) for x in scored)


# ==== 5. Update: the surrogate, its aggregation, the KL term ====================================

TERMS = {"reinforce": "token", "sequence": "completion", "token": "token",  # a loss has a term
         "gspo": "completion", "cispo": "token", "kl": "token"}  # for each token, or completion


def denominator(mask: Tensor, surrogate: str, aggregate: str, max_len=None):
    """What the sum of the terms of an update is divided by: the (B, T) mask is of all its rows."""
    if TERMS[surrogate] == "completion" or aggregate in ("sum", "mean"):
        return len(mask)
    if aggregate == "token":
        return mask.sum().clamp(min=1)
    if aggregate == "constant":
        return len(mask) * max_len
    raise ValueError(f"no aggregate {aggregate!r}: sum, mean, token or constant")


def aggregate_terms(terms: Tensor, mask: Tensor, aggregate, normalizer) -> Tensor:
    """Terms -> scalar; what is masked counts for nothing, even if it is NaN.
    "sum":      mean over completions of the sum over tokens (both books)
    "mean":     mean over completions of the mean over tokens (DeepSeekMath's GRPO)
    "token":    sum over all tokens / number of tokens (DAPO)
    "constant": sum over all tokens / (B * max_len) (Dr. GRPO)
    normalizer: the denominator, that of the whole update where its micro-batches' losses add up."""
    if aggregate == "mean":
        terms = terms / mask.sum(1, keepdim=True).clamp(min=1)
    return terms[mask].sum() / normalizer  # IndexError where TERMS has a surrogate's kind wrong


def ppo_terms(ratio, A, low, high) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, low, high) A), and where the clip took the gradient."""
    terms = -torch.minimum(ratio * A, ratio.clamp(low, high) * A)
    return terms, ((A > 0) & (ratio > high)) | ((A < 0) & (ratio < low))


def policy_loss(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, surrogate="reinforce",
    clip_eps=None, clip_eps_high=None, aggregate="sum", max_len=None,
    weights: Tensor | None = None, normalizer=None, off_policy_mask=None,
) -> tuple[Tensor, dict]:
    """The loss that makes completions better than their group likelier, and worse ones less so.
    Its terms; A advantage, l log-probability, lo = clip_eps, hi = clip_eps_high or else clip_eps:
    "reinforce"  token       -A l                              Williams 1992; first book
    "sequence"   completion  -min(r A, clip(r, 1-lo, 1+hi) A)  r = exp(sum(l - old)); 2nd book, 7.4
    "token"      token       the same                          r = exp(l - old); PPO, DeepSeekMath
    "gspo"       completion  the same                          r = exp(mean(l - old)); GSPO
    "cispo"      token       -stop_gradient(min(r, 1+hi)) A l  r = exp(l - old); MiniMax-M1
    logps, old_logps, mask (B, T), advantages (B,). Tokens' terms are aggregated, completions' terms
    averaged. weights: (B, T) importance weights; a completion takes their mean. With neither eps
    nothing is clipped (cispo: ValueError). Log-ratios are clamped to +-20: no infinity reaches a
    gradient. off_policy_mask D (DeepSeek-V3.2): completions with A < 0 and mean(old - l) > D give
    no loss. stats: the unclipped ratios; where the clip took the gradient (cispo: capped it)."""
    A = advantages.unsqueeze(1)  # (B, 1): where B == T, (B,) would broadcast along time
    clip_eps_high = clip_eps if clip_eps_high is None else clip_eps_high
    low = -math.inf if clip_eps is None else 1 - clip_eps
    high = math.inf if clip_eps_high is None else 1 + clip_eps_high
    # Masked before exp: a where() after it would still send NaN backward.
    logps = torch.where(mask, logps, 0.0)
    old_logps = torch.where(mask, old_logps, 0.0).detach()
    log_ratio = logps - old_logps  # (B, T)
    total = log_ratio.sum(1, keepdim=True)  # (B, 1)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    if surrogate == "reinforce":
        terms = -A * logps
        ratio = total.clamp(-20, 20).exp()  # for the statistics alone
        clipped = torch.zeros_like(ratio).bool()
    elif surrogate == "sequence":
        ratio = total.clamp(-20, 20).exp()
        terms, clipped = ppo_terms(ratio, A, low, high)
    elif surrogate == "token":
        ratio = log_ratio.clamp(-20, 20).exp()
        terms, clipped = ppo_terms(ratio, A, low, high)
    elif surrogate == "gspo":
        ratio = (total / lengths).clamp(-20, 20).exp()
        terms, clipped = ppo_terms(ratio, A, low, high)
    elif surrogate == "cispo" and high < math.inf:
        ratio = log_ratio.clamp(-20, 20).exp()
        terms = -ratio.clamp(max=high).detach() * A * logps
        clipped = ratio > high
    else:
        raise ValueError(f"no surrogate {surrogate!r} with clip_eps {clip_eps}")
    counted = mask if ratio.shape == mask.shape else mask.any(1, keepdim=True)
    ratios, clipped = ratio.detach()[counted], clipped[counted].float()
    if TERMS[surrogate] == "completion":
        if weights is not None:
            weights = torch.where(mask, weights, 0.0).sum(1, keepdim=True) / lengths
        mask, aggregate = mask.any(1, keepdim=True), "sum"  # (B, 1)
    if weights is not None:
        terms = terms * weights
    if off_policy_mask is not None:
        terms = torch.where((A < 0) & (-total / lengths > off_policy_mask), 0.0, terms)
    normalizer = normalizer or denominator(mask, surrogate, aggregate, max_len)
    return aggregate_terms(terms, mask, aggregate, normalizer), {
        "ratios": ratios, "clipped": clipped, "ratio_mean": ratios.mean(),
        "ratio_max": max(ratios.tolist(), default=math.nan), "clip_frac": clipped.mean()}


def kl_loss(
    logps: Tensor, ref_logps: Tensor, mask: Tensor, estimator="k3", aggregate="sum",
    old_logps=None, max_len=None, normalizer=None,
) -> Tensor:
    """KL(policy || reference), estimated on the sampled tokens; the coefficient is the caller's.
    With d = ref - l: the term of a token, always aggregated as tokens', and its average gradient
    "k1"        -d               0 on-policy; the reference is not in it; the second book's
    "k2"        d^2 / 2          that of KL(policy || reference), for one token
    "k3"        exp(d) - d - 1   that of KL(reference || policy); never negative; DeepSeekMath
    "weighted"  exp(l - old) k3  that of KL(policy || reference), off-policy too; DeepSeek-V3.2
    old_logps are the sampling policy's, for "weighted" (None: logps). k3 clamps d to at most 20."""
    old_logps = logps if old_logps is None else old_logps
    logps = torch.where(mask, logps, 0.0)
    old_logps = torch.where(mask, old_logps, 0.0).detach()
    d = torch.where(mask, ref_logps, 0.0).detach() - logps  # (B, T)
    k3 = d.clamp(max=20).exp() - d.clamp(max=20) - 1
    if estimator == "k1":
        terms = -d
    elif estimator == "k2":
        terms = d**2 / 2
    elif estimator == "k3":
        terms = k3
    elif estimator == "weighted":
        terms = (logps - old_logps).clamp(-20, 20).exp() * k3
    else:
        raise ValueError(f"no estimator {estimator!r}: k1, k2, k3 or weighted")
    normalizer = normalizer or denominator(mask, "kl", aggregate, max_len)
    return aggregate_terms(terms, mask, aggregate, normalizer)


# ==== 6. One step: sample, reward, compare, log-probabilities, update ===========================
def grpo_step(model, reference, optimizer, tokenizer, task, examples: list[dict], args) -> tuple:
    """One step on P examples, dicts with a "prompt": (metrics, samples) to log. reference: None
    without a KL term. args: the flags. FloatingPointError: a gradient that was not applied."""
    P, G, max_len = len(examples), args.group_size, args.max_new_tokens
    started = time.perf_counter()
    prompts = [encode_prompt(tokenizer, example["prompt"], args) for example in examples]
    rollout = sample(model, tokenizer, prompts, G, max_len, args.temperature, args.top_p)
    mask = rollout.mask  # (B, T)
    sampled = time.perf_counter()

    # Reward each completion with a program; compare it with its group.
    asked = [example for example in examples for _ in range(G)]  # B of them, prompt-major
    ids = [row[keep].tolist() for row, keep in zip(rollout.input_ids[:, -mask.shape[1]:], mask)]
    scores = rewards.score(task.rewards, rollout.texts, asked, ids)
    table = torch.tensor(np.array(scores, dtype=float))  # (K, B), NaN (0 in the sum): not applied
    weights = torch.tensor(task.weights or [1.0] * len(table), dtype=torch.float64)
    reward = (weights @ table.nan_to_num()).view(P, G)
    if args.advantage == "gdpo":
        advantages = gdpo_advantages(table.T.view(P, G, -1), weights)  # (P, G)
    else:
        size = (weights.abs() @ table.nan_to_num().abs()).view(P, G)
        advantages = group_advantages(reward, args.advantage, size=size)
    flat = (advantages == 0).all(1)  # (P,) groups with nothing to compare
    advantages = advantages.flatten().float().to(mask.device)  # (B,)
    rewarded = time.perf_counter()
    # Rows without a loss count in the denominators, and need no forward pass.
    rows = ((advantages != 0) | (args.kl_coef > 0)).nonzero().flatten()
    rows = rows[mask[rows].sum(1).argsort()]  # like lengths together: little padding
    micro_batches = rows.split(args.micro_batch or P * G) if len(rows) else ()
    normalizer = denominator(mask, args.surrogate, args.aggregate, max_len)
    kl_normalizer = denominator(mask, "kl", args.aggregate, max_len)
    # Log-probabilities before any update; with one pass they are the update's own, detached.
    old_logps, ref_logps = torch.zeros(2, *mask.shape, device=mask.device)  # (B, T)
    with torch.no_grad():
        for part in micro_batches:
            if args.inner_epochs > 1:
                old_logps[part], _ = rollout_logps(model, rollout, part, args.temperature)
            if reference:
                ref_logps[part], _ = rollout_logps(reference, rollout, part, args.temperature)

    # Update: inner_epochs passes over the rollout, an optimizer step for each. No pass where no row
    # has a loss: under Adam, momentum alone would move the weights. seen: what metrics average.
    seen = {"loss": [], "kl": [], "grad_norm": [], "ratio_mean": [], "clip_frac": [], "entropy": []}
    for _ in range(args.inner_epochs if micro_batches else 0):
        loss_sum = kl_sum = 0.0
        optimizer.zero_grad()
        for part in micro_batches:
            logps, entropy = rollout_logps(model, rollout, part, args.temperature)
            old = old_logps[part] if args.inner_epochs > 1 else logps.detach()
            loss, stats = policy_loss(
                logps, old, advantages[part], mask[part], args.surrogate,
                *(args.clip_eps or ()), aggregate=args.aggregate, normalizer=normalizer)
            if reference:
                kl = kl_loss(logps, ref_logps[part], mask[part], args.kl, args.aggregate, old,
                             normalizer=kl_normalizer)
                loss = loss + args.kl_coef * kl
                kl_sum += kl.item()
            loss.backward()
            loss_sum += loss.item()
            seen["entropy"] += entropy[mask[part]].tolist()
            seen["ratio_mean"] += stats["ratios"].tolist()
            seen["clip_frac"] += stats["clipped"].tolist()
        grad_norm = clip_grad_norm_(model.parameters(), 1.0).item()
        if not math.isfinite(loss_sum + grad_norm):
            raise FloatingPointError(f"loss {loss_sum}, gradient norm {grad_norm}")
        optimizer.step()
        seen["loss"].append(loss_sum)
        seen["kl"] += [kl_sum] if reference else []
        seen["grad_norm"].append(grad_norm)

    # Log. Statistics of the update are of its rows with a loss, in all passes; null without any.
    ended = time.perf_counter()
    lengths = mask.sum(1).double()
    metrics = {
        "reward": reward.mean().item(), "reward_std": reward.std(1).mean().item(),
        **{f"reward/{rewards.name(f)}": x.nanmean().item() for f, x in zip(task.rewards, table)
           if not x.isnan().all()},
        "advantage_std": advantages.std().item(), "flat_groups": flat.double().mean().item(),
        **{name: sum(values) / len(values) if values else None for name, values in seen.items()},
        "ratio_max": max(seen["ratio_mean"], default=None), "length": lengths.mean().item(),
        "length_max": int(lengths.max()), "truncated": rollout.truncated.double().mean().item(),
        "think": float(np.mean(rewards.worked(rollout.texts))),
        "lr": optimizer.param_groups[0]["lr"], "seconds": ended - started,
        "seconds_sample": sampled - started, "seconds_update": ended - rewarded,
        "tokens_per_s": lengths.sum().item() / (ended - started)}
    columns = zip(asked, rollout.texts, zip(*scores), reward.flatten(), advantages)
    samples = [{"prompt": example["prompt"], "completion": text, "rewards": row, "reward": r.item(),
                "advantage": a.item()} for example, text, row, r, a in columns]
    return metrics, samples


# ==== Part II: the program around it ============================================================
def encode_prompt(tokenizer, prompt, args):
    """Ids of a text or of chat messages. A chat template brings its own special tokens, and what
    the assistant says last is continued; a text gets one BOS where the tokenizer puts any."""
    if args.no_chat_template or not tokenizer.chat_template:
        text = rewards.text_of(prompt)
        first = tokenizer(text).input_ids[:1]
        ids = tokenizer(text, add_special_tokens=False).input_ids
        return first + ids if first == [tokenizer.bos_token_id] != ids[:1] else ids
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    unfinished = messages[-1]["role"] == "assistant"
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=not unfinished,
        continue_final_message=unfinished, enable_thinking=False)
    return tokenizer(text, add_special_tokens=False).input_ids


def pad_rows(rows, side, device):
    """Lists of ids -> (ids, attention mask), both (B, longest), padded with 0 on one side."""
    tensors = [torch.tensor(row) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(tensors, True, -1, side).to(device)
    return ids.clamp(min=0), (ids >= 0).long()


def tiny_policy():
    """(model, tokenizer): Qwen3's architecture at 0.5 million parameters, a token for each byte."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", "<pad>"]  # 258
    tokenizer = transformers.GPT2Tokenizer(
        {token: i for i, token in enumerate(tokens)}, merges=[], unk_token=None, bos_token=None,
        eos_token="<eos>", pad_token="<pad>")
    config = transformers.Qwen3Config(
        vocab_size=258, hidden_size=128, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
        max_position_embeddings=1024, eos_token_id=256, pad_token_id=257)
    return transformers.Qwen3ForCausalLM(config), tokenizer


def warm_start(model, tokenizer, task, seed):
    """Supervised fine-tuning on demonstrations: GRPO's loss, completions given, advantages of 1."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)
    for step in tqdm(range(task.warm_start_steps), "warm start", disable=None, leave=False):
        progress = step / task.warm_start_steps
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - progress)
        prompts, answers = zip(*[task.demonstrations(rng, progress) for _ in range(16)])
        answers = [answer + tokenizer.eos_token for answer in answers]
        prompt_ids, prompt_mask = pad_rows(tokenizer(prompts).input_ids, "left", model.device)
        answer_ids, mask = pad_rows(tokenizer(answers).input_ids, "right", model.device)
        input_ids = torch.cat([prompt_ids, answer_ids], 1)  # (B, L+T)
        logps, _ = token_logps(model, input_ids, torch.cat([prompt_mask, mask], 1), mask.shape[1])
        loss, _ = policy_loss(logps, logps, logps.new_ones(16), mask.bool(), aggregate="token")
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def load_policy(source):
    """(model, tokenizer) of a directory or a hub name: float32, every weight from the file."""
    model, info = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{len(missing)} weights are not in the file and would be random: "
                         f"{missing[0]}, ...; save the whole model under its own names")
    if unused := sorted(info["unexpected_keys"]):
        print(f"warning: {len(unused)} weights in the file are not used: {unused[0]}, ...")
    if getattr(model.config, "output_router_logits", False):
        model.config.output_router_logits = False  # a mixture's auxiliary loss is not added
    tokenizer = AutoTokenizer.from_pretrained(source)
    if len(tokenizer) == len(tokenizer.all_special_ids):
        raise ValueError("no tokenizer there")  # transformers made one up from the config
    return model, tokenizer


@torch.no_grad()
def check_sampler(model, tokenizer, prompt, max_new_tokens):
    """ValueError where `generate`, beside padding, computes other logits than token_logps scores
    row by row. (The tokenizer must stand the last id that could be drawn, too.)"""
    tokenizer.decode([len(model.get_input_embeddings().weight) - 1])
    logits = []  # of each call of the model while it samples, (2, V)
    hook = model.register_forward_hook(lambda *call: logits.append(call[2].logits[:, -1].float()))
    rollout = sample(model, tokenizer, [prompt, prompt[:1]], 1, min(8, max_new_tokens))
    hook.remove()
    logps = torch.cat([rollout_logps(model, rollout, [row], 1.0)[0] for row in (0, 1)])
    drawn = rollout.input_ids[:, -len(logits):, None]  # (2, T, 1)
    generated = torch.stack(logits, 1).log_softmax(2).gather(2, drawn).squeeze(2)
    gap = (logps - generated)[rollout.mask].abs().max().item()
    if not gap <= (0.1 if model.device.type == "cuda" else 0.01):
        raise ValueError(f"`generate` and a forward pass are {gap:.2g} nats apart on a token: what "
                         "it samples is not what would be trained")


def save(run, model, tokenizer, optimizer, reference, step):
    """Beside the old checkpoint, then in its place: a whole one is there at every moment."""
    new, old, own = run / "checkpoint.new", run / "checkpoint.old", model.generation_config
    model.generation_config = GenerationConfig()  # its own may be one that cannot be saved
    model.save_pretrained(new)
    model.generation_config = own
    own.to_json_file(new / "generation_config.json")
    tokenizer.save_pretrained(new)
    sizes = {log.name: log.stat().st_size for log in run.glob("*.jsonl")}
    weights = reference and reference.state_dict()
    torch.save({"step": step, "optimizer": optimizer.state_dict(), "reference": weights,
                "log_sizes": sizes}, new / "trainer.pt")
    if (run / "checkpoint").exists():
        shutil.rmtree(old, ignore_errors=True)
        (run / "checkpoint").rename(old)
    new.rename(run / "checkpoint")
    shutil.rmtree(old, ignore_errors=True)


def held_out_accuracy(args, task, model, tokenizer):
    texts = []  # greedy: no random number is drawn
    prompts = [encode_prompt(tokenizer, example["prompt"], args) for example in task.test]
    for i in range(0, len(prompts), 64):
        texts += sample(model, tokenizer, prompts[i:i + 64], 1, args.max_new_tokens, 0).texts
    return float(np.mean(rewards.score([task.evaluate], texts, task.test)))


def report(step, metrics, sample, flat_steps):
    names = ("reward", "eval_accuracy", "flat_groups", "loss", "kl", "grad_norm", "ratio_mean",
             "clip_frac", "entropy", "length", "think", "truncated", "seconds")
    shown = [f"{name} {metrics[name]:.3g}" for name in names if metrics.get(name) is not None]
    tqdm.write(f"step {step}  {'  '.join(shown)}")
    tqdm.write(f"    reward {sample['reward']:g}: {sample['completion']!r}")
    if flat_steps >= 10:
        tqdm.write(f"warning: {flat_steps} steps with nothing to compare: if rewards are lowest, "
                   "raise --temperature or grade the --reward; if highest, stop")
    if metrics["truncated"] > 0.5:
        tqdm.write("warning: --max-new-tokens cut more than half of the completions")


def train(args, task, model, tokenizer, stop, state):
    """The loop, to args.steps or the step that finds `stop` set. From a checkpoint's state it goes
    on as if never stopped: what is random in a step follows from seed and number."""
    run = Path(args.out)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.0, fused=True)
    reference = copy.deepcopy(model).requires_grad_(False) if args.kl_coef > 0 else None
    if state:
        optimizer.load_state_dict(state["optimizer"])
    if reference and state.get("reference"):  # else it starts from the policy as resumed
        reference.load_state_dict(state["reference"])
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (run / name).open("ab") as file:  # drop the lines of steps that will come again
            file.truncate(state["log_sizes"][name] if state else 0)

    def record(name, step, rows):
        with (run / name).open("a") as file:
            file.writelines(json.dumps({"step": step, **row}) + "\n" for row in rows)

    flat_steps = 0
    step = done = state.get("step", 0)
    if args.eval_every and not state:
        before = {"eval_accuracy": held_out_accuracy(args, task, model, tokenizer)}
        record("metrics.jsonl", 0, [before])
    for step in tqdm(range(done + 1, args.steps + 1), "GRPO", disable=None):
        transformers.set_seed((args.seed * 1_000_000 + step) % 2**32)  # torch, random and numpy
        optimizer.param_groups[0]["lr"] = args.lr  # a schedule goes here
        examples = task.batch((step - 1) * args.prompts_per_step, args.prompts_per_step, args.seed)
        try:
            metrics, samples = grpo_step(
                model, reference, optimizer, tokenizer, task, examples, args)
        except (rewards.RewardError, FloatingPointError) as error:
            if isinstance(error, rewards.RewardError):  # it comes before any update
                save(run, model, tokenizer, optimizer, reference, step - 1)
            if error.__cause__:
                raise  # a bug in a reward keeps its traceback
            sys.exit(f"grpo.py: step {step}: {error}")
        last = stop.is_set() or step == args.steps
        if args.eval_every and (last or step % args.eval_every == 0):
            metrics["eval_accuracy"] = held_out_accuracy(args, task, model, tokenizer)
        record("metrics.jsonl", step, [metrics])
        record("samples.jsonl", step, samples)
        flat_steps = (flat_steps + 1) * (metrics["flat_groups"] == 1)
        if step == 1 or last or step % 10 == 0:
            report(step, metrics, samples[0], flat_steps)
        if last:
            break
        if args.save_every and step % args.save_every == 0:
            save(run, model, tokenizer, optimizer, reference, step)
    save(run, model, tokenizer, optimizer, reference, step)


def make_parser():
    def within(kind, low, high=1e300):  # an argparse type: from low to high, and not NaN
        def number(text):
            if not low <= kind(text) <= high:
                raise argparse.ArgumentTypeError(f"{text} is not from {low:g} to {high:g}")
            return kind(text)
        return number

    parser = argparse.ArgumentParser(
        "grpo.py", usage=argparse.SUPPRESS, allow_abbrev=False,
        description=__doc__.partition("Part I")[0],  # with two examples
        formatter_class=argparse.RawDescriptionHelpFormatter)
    count, positive = within(int, 1), within(float, 0)
    flag = parser.add_argument_group("task").add_argument
    flag("--task", choices=rewards.TASKS, default="format", help="of rewards.py (format)")
    flag("--data", help="file of JSON lines, each with a prompt")
    flag("--reward", nargs="+", choices=rewards.REWARDS, help="in place of the task's")
    flag("--reward-weights", nargs="+", type=within(float, -1e9), help="(1 each)")
    flag("--eval-every", type=count, help="steps between greedy held-out accuracies (never)")
    flag("--eval-data", help="held-out JSON lines (the task's)")
    flag = parser.add_argument_group("model").add_argument
    flag("--model", help="tiny, a directory or a hub name: Qwen/Qwen3-0.6B (tiny)")
    flag("--device", help="as torch names it (cuda where there is one, else cpu)")
    flag("--no-chat-template", action="store_true", help="prompts reach the model as written")
    flag = parser.add_argument_group("run").add_argument
    flag("--steps", type=within(int, 0), default=200, help="0 only warm-starts (200)")
    flag("--seed", type=within(int, 0), default=0, help="of all that is random (0)")
    flag("--out", help="folder of the run (runs/TASK-TIME)")
    flag("--save-every", type=count, help="steps between checkpoints (one at the end)")
    flag("--resume", help="folder of a run; its config.json gives the flags")
    flag = parser.add_argument_group("sampling").add_argument
    flag("--prompts-per-step", type=count, help="each with a group (the task's)")
    flag("--group-size", type=within(int, 2), default=8, help="G, completions of a prompt (8)")
    flag("--max-new-tokens", type=count, help="of a completion (the task's)")
    flag("--temperature", type=within(float, 1e-3), default=1.0, help="of samples and logps (1)")
    flag("--top-p", type=within(float, 1e-6, 1), default=1.0, help="nucleus (1: all)")
    flag = parser.add_argument_group("loss").add_argument
    flag("--advantage", choices=("std", "none", "gdpo"), default="std", help="its scale (std)")
    flag("--surrogate", choices=[x for x in TERMS if x != "kl"], help="(sequence with a clip)")
    flag("--clip-eps", type=positive, nargs="+", metavar="EPS", help="EPS, or LOW HIGH (none)")
    flag("--aggregate", choices=("sum", "mean", "token", "constant"), default="sum", help="(sum)")
    flag("--kl-coef", type=positive, default=0.0, help="0: no term, no reference model (0)")
    flag("--kl", choices=("k1", "k2", "k3", "weighted"), default="k3", help="its estimator (k3)")
    flag("--lr", type=positive, help="AdamW's (1e-5; under 10M parameters, the task's)")
    flag("--inner-epochs", type=count, help="updates from a rollout (2 with a clip, else 1)")
    flag("--micro-batch", type=count, help="rows in one backward, for memory (all)")
    return parser


def parse_args(argv):
    """(args, task, refuse), checked and resolved; refuse(message) is one line and exit status 2."""
    parser = make_parser()
    args, refuse = parser.parse_args(argv), parser.error
    if args.resume and (args.model or args.out):
        refuse("--resume goes on with the run's own model and folder, without --model and --out")
    try:
        if args.resume:
            config = json.loads(Path(args.resume, "config.json").read_text())
            parser.set_defaults(**{**config, "out": args.resume})
            args = parser.parse_args(argv)
        task = rewards.make_task(args)
    except (OSError, ValueError, TypeError, KeyError) as error:
        refuse(f"--resume {args.resume}: {error}" if args.resume else str(error))
    for name, value in {
        "model": "tiny", "device": "cuda" if torch.cuda.is_available() else "cpu",
        "out": f"runs/{args.task}-{time.strftime('%Y%m%d-%H%M%S')}",
        "surrogate": "sequence" if args.clip_eps else "reinforce",
        "inner_epochs": 2 if args.clip_eps else 1, "max_new_tokens": task.max_new_tokens,
        "prompts_per_step": task.prompts_per_step}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if len(args.clip_eps or ()) > 2:
        refuse("--clip-eps takes one number, or two: LOW HIGH")
    if args.clip_eps and args.surrogate == "reinforce":
        refuse("--clip-eps: --surrogate reinforce has no ratio to clip; use sequence or token")
    if args.surrogate == "cispo" and not args.clip_eps:
        refuse("--surrogate cispo needs --clip-eps")
    if args.eval_every and not task.test:
        refuse("--eval-every needs --eval-data: nothing is held out")
    if args.model == "tiny" and not task.demonstrations:
        refuse(f"--model tiny: {args.task} has no demonstrations to start from; use a DIRECTORY")
    log = Path(args.out, "metrics.jsonl")
    if not args.resume and log.exists() and log.stat().st_size:
        refuse(f"--out {args.out} already holds a run; name another folder, or --resume it")
    return args, task, refuse


def main(argv=None):
    """Exit status 0; 1: the run could not go on; 2: the user's mistake; 130: stopped by Ctrl-C."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    args, task, refuse = parse_args(argv)
    out, source, state = Path(args.out), args.model, {}
    fresh = args.model == "tiny" and not args.resume
    print(f"model: {args.model} (or --model DIRECTORY, or a hub name)", flush=True)
    torch.manual_seed(args.seed)  # the tiny model's weights
    blame = f"--model {args.model} (offline: --model tiny, --model DIRECTORY)"
    try:
        if args.resume:  # from the old checkpoint, if a kill came between the renames of `save`
            blame = f"--resume {out}"
            source = out / ("checkpoint" if (out / "checkpoint").exists() else "checkpoint.old")
            state = torch.load(source / "trainer.pt", "cpu")
        model, tokenizer = tiny_policy() if fresh else load_policy(source)
        prompts, known = [], len(model.get_input_embeddings().weight)
        room = getattr(model.config.get_text_config(), "max_position_embeddings", 0) or math.inf
        for kind, examples in (("training", task.train), ("held-out", task.test)):
            for row, example in enumerate(examples, 1):
                blame = f"{kind} example {row}"
                prompts.append(encode_prompt(tokenizer, example["prompt"], args))
                ids = prompts[-1]
                if not 0 < len(ids) <= room - args.max_new_tokens:
                    raise ValueError(f"a prompt of {len(ids)} tokens and --max-new-tokens "
                                     f"{args.max_new_tokens} do not fit a context of {room}")
                if max(ids) >= known:
                    raise ValueError(f"no row for token {max(ids)}: resize_token_embeddings first")
        blame = f"--device {args.device}"
        model = model.to(args.device)
        blame = f"--model {args.model}"
        check_sampler(model, tokenizer, max(prompts, key=len), args.max_new_tokens)
        blame = f"--out {out}"
        out.mkdir(parents=True, exist_ok=True)
    except Exception as error:  # whatever a damaged file or a chat template makes others raise
        refuse(f"{blame}: {' '.join(str(error).split())[:300]}")
    if args.lr is None:
        args.lr = task.small_model_lr if model.num_parameters() < 10_000_000 else 1e-5
    config = {**vars(args), "torch": torch.__version__, "transformers": transformers.__version__}
    (out / "config.json.new").write_text(json.dumps(config, indent=2))
    (out / "config.json.new").replace(out / "config.json")  # a kill never leaves half of it
    print(f"first prompt: {tokenizer.decode(prompts[0])!r}")
    if fresh:
        warm_start(model, tokenizer, task, args.seed)
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())  # Ctrl-C: finish the step and save
    train(args, task, model, tokenizer, stop, state)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    if curve := [row["reward"] for row in rows if row["step"]]:
        print(f"mean reward: first 5 steps {np.mean(curve[:5]):.2f}, "
              f"last 20 {np.mean(curve[-20:]):.2f}")
    print(f"written to {out}: config.json, metrics.jsonl, samples.jsonl, checkpoint")
    return 130 if stop.is_set() else 0


if __name__ == "__main__":
    sys.exit(main())
