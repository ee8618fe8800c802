# SPDX-License-Identifier: MIT
"""GRPO (Group Relative Policy Optimization) in one file, to be read from the top and then run.

    python grpo.py                   a model learns to write answer tags, in a minute on a CPU
    python grpo.py --clip-eps 10     the same with a clipped policy ratio; rollouts are used twice

One training step, in the order of this file:
    1. sample            G completions of one prompt, drawn from the policy: the group
    2. rewards.score     a program gives each completion a number
    3. group_advantages  how much better than its group is each completion?
    4. token_logps       the log-probability of every sampled token under the policy
    5. policy_loss       makes the better ones likelier; kl_loss holds the policy near a reference
    6. train             backward, clip the gradient norm, AdamW; then sample again

Departures from the two books (README: "Where the sources and the arithmetic part ways"):
  - The clip is PPO's min(r A, clip(r) A), on both sides; the second book's code clips above only.
  - With a clip a rollout is used twice (the first book's reuse); the second book samples anew.
  - Samples and log-probabilities are of one temperature; in the second book, of 0.8 and of 1.
  - A step without signal or KL term is skipped: under Adam, momentum alone would move the weights.
  - A KL term (--kl-coef) is k3. The second book's, k1, has a gradient without the reference in it.
  - Weights are float32 (autocast to bf16 on CUDA): bf16 weights round most steps of 1e-5 away.

Shapes: P prompts of L tokens, G completions each of T, B = P*G rows, V vocabulary, K rewards.
"""

import argparse
import contextlib
import copy
import json
import math
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, rnn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, logging

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
    """True up to and including the first EOS, all True where there is none: (B, T) bool.
    eos_ids: an int or a collection of ints. Going by EOS and not by padding keeps the real EOS in
    the loss where pad and EOS are the same token. (First book: the completion mask.)"""
    eos_ids = [eos_ids] if isinstance(eos_ids, int) else list(eos_ids)
    is_eos = torch.isin(completion_ids, completion_ids.new_tensor(eos_ids))
    return is_eos.cumsum(1) - is_eos.long() == 0  # no EOS strictly before this position

def pad(rows: list[list[int]], pad_id: int, side: str, device) -> tuple[Tensor, Tensor]:
    """Lists of ids -> (ids, attention mask), both (B, longest), padded on one side."""
    ids = rnn.pad_sequence([torch.tensor(row) for row in rows], True, -1, side).to(device)
    return ids.masked_fill(ids < 0, pad_id), (ids >= 0).long()

@contextlib.contextmanager
def fixed_network(model):
    """`sample` and `token_logps` see the same network: no dropout; on CUDA, bf16 autocast."""
    training, device = model.training, model.device.type
    model.eval()
    try:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            yield
    finally:
        model.train(training)

def sample(model, tokenizer, prompts: list, group_size: int, max_new_tokens: int,
           temperature: float = 1.0, top_p: float = 1.0) -> Rollout:
    """Draw group_size completions of each prompt (text or token ids), in adjacent rows; temperature
    0 is greedy. The model's own generation config (top_k, repetition penalty, ...) is set aside but
    for its EOS ids: `generate` shall draw from token_logps' distribution (top_p < 1 does not)."""
    own_config = model.generation_config
    eos = own_config.eos_token_id  # None, an int or a list
    eos_ids = sorted({tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None})
    pad_id = [*eos_ids, 0][0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    prompts = [tokenizer(p)["input_ids"] if isinstance(p, str) else p for p in prompts]
    rows = [ids for ids in prompts for _ in range(group_size)]
    prompt_ids, prompt_mask = pad(rows, pad_id, "left", model.device)  # (B, L)
    model.generation_config = GenerationConfig(eos_token_id=eos_ids or None, pad_token_id=pad_id)
    try:
        with fixed_network(model), torch.inference_mode():  # faster than no_grad
            input_ids = model.generate(
                prompt_ids, attention_mask=prompt_mask, max_new_tokens=max_new_tokens, top_k=0,
                do_sample=temperature > 0, temperature=temperature or 1.0, top_p=top_p)  # (B, L+T)
    finally:
        model.generation_config = own_config
    input_ids = input_ids.clone()  # what inference_mode made cannot take part in a gradient
    completion_ids = input_ids[:, prompt_ids.shape[1]:]  # (B, T)
    mask = completion_mask(completion_ids, eos_ids)
    truncated = ~torch.isin(completion_ids, completion_ids.new_tensor(eos_ids)).any(1)
    ends = (mask.sum(1) - (~truncated).long()).tolist()  # the text stops before the EOS
    texts = [tokenizer.decode(row[:end]) for row, end in zip(completion_ids.tolist(), ends)]
    return Rollout(input_ids, torch.cat([prompt_mask, mask.long()], 1), mask, texts, truncated)

# ==== 2. Reward (rewards.score, in rewards.py) and 3. Compare: the group is its own baseline ====
def group_advantages(rewards: Tensor, scale: str = "std", eps: float = 1e-4) -> Tensor:
    """How much better than its group each completion is: rewards (P, G) -> advantages (P, G).
    "std":  (r - mean) / (std + eps), the std unbiased (the first book's code line; DeepSeekMath)
    "none": r - mean (Dr. GRPO)
    Exactly 0 where a group's rewards differ by at most 1e-12: in float32 the std of eight times 0.1
    is 8e-9, and such rounding errors would pass for advantages. ValueError for G < 2."""
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be (P, G) with G at least 2, not {tuple(rewards.shape)}")
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))  # ints have no mean
    spread = {"std": rewards.std(1, keepdim=True) + eps, "none": 1.0}[scale]
    flat = torch.isclose(rewards, rewards[:, :1], 1e-12, 1e-12).all(1, keepdim=True)  # (P, 1)
    return ((rewards - rewards.mean(1, keepdim=True)) / spread).masked_fill(flat, 0.0)

def gdpo_advantages(rewards: Tensor, weights, eps: float = 1e-4) -> Tensor:
    """GDPO: each of K rewards is normalised in its group before they are added, so that none drowns
    the others. rewards (P, G, K) -> (P, G): x = sum of weights[k] * A_k, then (x - mean) / (std +
    eps) over all P*G; flat groups stay exactly 0. With one reward: GRPO's A, uniformly rescaled."""
    each = zip(rewards.unbind(2), weights, strict=True)
    total = sum(weight * group_advantages(reward, eps=eps) for reward, weight in each)
    x = group_advantages(total, "none")  # the mean of each group is 0 already, so that of all is
    return x / (x.std() + eps)

# ==== 4. Log-probabilities: of exactly the sampled tokens, under the policy =====================
def token_logps(model, input_ids: Tensor, attention_mask: Tensor, completion_len: int,
                temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability l of each of the last completion_len tokens, and the entropy (nats) there.
    l_t = z_t[token_t] - logsumexp(z_t), z = logits / temperature: the temperature that sampled, or
    it would be another policy's. input_ids, attention_mask (B, L+T): prompts padded on the left,
    then completions -> both float32 (B, T); gradients flow through l alone."""
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)  # padding takes no position
    with fixed_network(model):
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False,
                       position_ids=position_ids, logits_to_keep=completion_len + 1).logits
    # Logits predict the next token: the prompt's last position scores the first completion token.
    logits = logits[:, -completion_len - 1:-1].float() / temperature  # (B, T, V)
    tokens = input_ids[:, -completion_len:].unsqueeze(2)  # (B, T, 1)
    logps = logits.gather(2, tokens).squeeze(2) - logits.logsumexp(2)
    return logps, torch.special.entr(logits.detach().softmax(2)).sum(2)

# ==== 5. Update: the surrogate, its aggregation, the KL term ====================================
PER_COMPLETION = ("sequence", "gspo")  # have a term for each completion, the others for each token

def denominator(mask: Tensor, aggregate: str, max_len: int | None = None):
    """What `aggregate_terms` divides by, from the (B, T) mask of all rows of an update."""
    if aggregate == "token":
        return mask.sum().clamp(min=1)
    return len(mask) * {"sum": 1, "mean": 1, "constant": max_len}[aggregate]

def aggregate_terms(terms, mask, aggregate="sum", max_len=None, normalizer=None) -> Tensor:
    """(B, T) terms -> scalar. What is masked counts for nothing, even if it is NaN.
    "sum":      mean over completions of the sum over tokens (both books)
    "mean":     mean over completions of the mean over tokens (DeepSeekMath's GRPO)
    "token":    sum over all tokens / number of tokens (DAPO)
    "constant": sum over all tokens / (B * max_len) (Dr. GRPO)
    normalizer: the denominator of the whole update, so that its micro-batches' losses add up."""
    terms = torch.where(mask, terms, 0.0)
    if aggregate == "mean":
        terms = terms / mask.sum(1, keepdim=True).clamp(min=1)
    return terms.sum() / (normalizer or denominator(mask, aggregate, max_len))

def policy_loss(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor,
    surrogate: str = "reinforce", clip_eps: float | None = None, clip_eps_high: float | None = None,
    aggregate: str = "sum", max_len: int | None = None, weights: Tensor | None = None,
    normalizer=None, off_policy_mask: float | None = None,
) -> tuple[Tensor, dict]:
    """The loss that makes completions better than their group likelier, and worse ones less so.
    Its terms; A advantage, l log-probability, lo = clip_eps, hi = clip_eps_high or else clip_eps:
    "reinforce"  token       -A l                              Williams 1992; the first book
    "sequence"   completion  -min(r A, clip(r, 1-lo, 1+hi) A)  r = exp(sum(l - old)); 2nd book, 7.4
    "token"      token       the same                          r = exp(l - old); PPO, DeepSeekMath
    "gspo"       completion  the same                          r = exp(mean(l - old)); GSPO
    "cispo"      token       -stop_gradient(min(r, 1+hi)) A l  r = exp(l - old); MiniMax-M1
    logps, old_logps, mask (B, T), advantages (B,). Tokens' terms go through aggregate_terms, those
    of completions are averaged. weights: (B, T) importance weights; a completion takes their mean.
    Without either eps nothing is clipped (cispo: ValueError). Log-ratios are clamped to +-20 before
    exp: no infinity reaches a gradient, and beyond that a ratio passes none.
    off_policy_mask D (DeepSeek-V3.2): completions with A < 0 and mean(old - l) > D give no loss,
    but stay in the denominator. stats, padding left out: ratios before the clip; clipped: it took
    the gradient (cispo: capped the weight); ratio_mean, ratio_max, clip_frac."""
    A = advantages.unsqueeze(1)  # (B, 1): where B == T, (B,) would broadcast along time
    lo = math.inf if clip_eps is None else clip_eps
    hi = lo if clip_eps_high is None else clip_eps_high
    # Masked before exp: a where() after it would still send NaN backward.
    logps, old_logps = torch.where(mask, logps, 0.0), torch.where(mask, old_logps, 0.0).detach()
    lengths = mask.sum(1, keepdim=True).clamp(min=1)  # (B, 1)
    log_ratio, active = logps - old_logps, mask  # (B, T)
    if surrogate not in ("token", "cispo"):  # reinforce has a ratio in its stats alone
        log_ratio, active = log_ratio.sum(1, keepdim=True), mask.any(1, keepdim=True)  # (B, 1)
    log_ratio = log_ratio / lengths if surrogate == "gspo" else log_ratio
    ratio = log_ratio.clamp(-20, 20).exp()
    if surrogate == "reinforce":
        terms, clipped = -A * logps, torch.zeros_like(active)
    elif surrogate == "cispo" and hi < math.inf:
        terms, clipped = -ratio.clamp(max=1 + hi).detach() * A * logps, ratio > 1 + hi
    elif surrogate in ("sequence", "token", "gspo"):
        terms = -torch.minimum(ratio * A, ratio.clamp(1 - lo, 1 + hi) * A)
        clipped = ((A > 0) & (ratio > 1 + hi)) | ((A < 0) & (ratio < 1 - lo))
    else:
        raise ValueError(f"no surrogate {surrogate!r} with clip_eps {clip_eps}")
    if weights is not None:
        average = torch.where(mask, weights, 0.0).sum(1, keepdim=True) / lengths
        terms = terms * (average if surrogate in PER_COMPLETION else weights)
    if off_policy_mask is not None:
        drift = (old_logps - logps).sum(1, keepdim=True) / lengths  # (B, 1)
        terms = torch.where((A < 0) & (drift > off_policy_mask), 0.0, terms)
    if surrogate in PER_COMPLETION:
        mask, aggregate = active, "sum"  # the mean of (B, 1) terms
    loss = aggregate_terms(terms, mask, aggregate, max_len, normalizer)
    ratios, clipped = ratio.detach()[active], clipped[active].float()
    return loss, {"ratios": ratios, "clipped": clipped, "ratio_mean": ratios.mean(),
                  "ratio_max": max(ratios.tolist(), default=math.nan), "clip_frac": clipped.mean()}

def kl_loss(
    logps: Tensor, ref_logps: Tensor, mask: Tensor, estimator: str = "k3", aggregate: str = "sum",
    old_logps: Tensor | None = None, max_len: int | None = None, normalizer=None,
) -> Tensor:
    """KL(policy || reference), estimated on the sampled tokens; the coefficient is the caller's.
    With d = ref - l, aggregated like the policy loss: the term of a token, and its average gradient
    "k1"        -d               0 on-policy; the reference is not in it; the second book's
    "k2"        d^2 / 2          that of KL(policy || reference), for one token
    "k3"        exp(d) - d - 1   that of KL(reference || policy); never negative; DeepSeekMath
    "weighted"  exp(l - old) k3  that of KL(policy || reference), off-policy too; DeepSeek-V3.2
    old_logps are the sampling policy's, for "weighted" (None: logps). k3 clamps d to at most 20."""
    logps, ref_logps = torch.where(mask, logps, 0.0), torch.where(mask, ref_logps, 0.0).detach()
    old_logps = logps.detach() if old_logps is None else torch.where(mask, old_logps, 0.0).detach()
    d = ref_logps - logps  # (B, T)
    k3 = d.clamp(max=20).exp() - d.clamp(max=20) - 1
    weighted = (logps - old_logps).clamp(-20, 20).exp() * k3
    terms = {"k1": -d, "k2": d**2 / 2, "k3": k3, "weighted": weighted}[estimator]
    return aggregate_terms(terms, mask, aggregate, max_len, normalizer)

# ==== 6. Train: a policy, and one flat loop =====================================================
TINY, LARGE = "tiny", "Qwen/Qwen3-0.6B"
PRINTED = ("step", "reward", "eval_accuracy", "flat_groups", "loss", "kl", "grad_norm",
           "ratio_mean", "clip_frac", "entropy", "length", "think", "truncated", "seconds")

def tiny_policy():
    """(model, tokenizer): Qwen3's architecture at 0.5 million parameters, a token for each byte."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", "<pad>"]  # 258
    bytewise = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, **special)
    config = transformers.Qwen3Config(
        vocab_size=258, hidden_size=128, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=256, pad_token_id=257)
    return transformers.Qwen3ForCausalLM(config), tokenizer

def warm_start(model, tokenizer, task: rewards.Task, seed: int, batch=16, lr=3e-3) -> None:
    """Supervised fine-tuning on demonstrations: GRPO's loss, completions given, advantages of 1."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0, fused=True)
    for step in tqdm(range(task.warm_start_steps), "warm start", disable=None, leave=False):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / task.warm_start_steps)
        prompts, answers = zip(*(task.demonstrations(rng) for _ in range(batch)), strict=True)
        answers = [answer + tokenizer.eos_token for answer in answers]
        prompt_ids, prompt_mask = pad(tokenizer(prompts)["input_ids"], 0, "left", model.device)
        answer_ids, mask = pad(tokenizer(answers)["input_ids"], 0, "right", model.device)  # (B, T)
        input_ids = torch.cat([prompt_ids, answer_ids], 1)  # (B, L+T)
        logps, _ = token_logps(model, input_ids, torch.cat([prompt_mask, mask], 1), mask.shape[1])
        loss, _ = policy_loss(logps, logps, logps.new_ones(batch), mask.bool(), aggregate="token")
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

def encode_prompt(tokenizer, prompt: str | list[dict], args) -> list[int]:
    """Ids of a string or of chat messages, through the chat template where there is one, and with
    one BOS where the tokenizer puts one: a template may contain it already."""
    text = rewards.text_of(prompt)
    if tokenizer.chat_template and not args.no_chat_template:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, enable_thinking=args.thinking)
    ids = tokenizer(text)["input_ids"]
    return ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids

def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None

def train(args, task: rewards.Task, model, tokenizer, stop: list, state: dict | None) -> None:
    """The loop, up to args.steps or the step that finds `stop` filled. From `state` it goes on as
    if never stopped: what is random in a step, its prompts too, follows from seed and number."""
    P, G = args.prompts_per_step * (1 + args.dynamic_sampling), args.group_size  # spares included
    B, T_max, device = P * G, args.max_new_tokens, model.device
    out, checkpoint = Path(args.out), Path(args.out, "checkpoint")
    reward_weights = torch.tensor(task.weights or [1.0] * len(task.rewards), dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.0, fused=True)
    reference = copy.deepcopy(model).requires_grad_(False) if args.kl_coef > 0 else None
    done, flat_steps = (state["step"] if state else 0), 0
    if state:
        optimizer.load_state_dict(state["optimizer"])
        optimizer.param_groups[0]["lr"] = args.lr  # another --lr may come with --resume
        if reference and state["reference"]:  # else it starts from the policy as resumed
            reference.load_state_dict(state["reference"])
    for path in (out / "metrics.jsonl", out / "samples.jsonl"):
        with path.open("a+b") as file:  # drop the lines of steps that will come again, step 0 too
            file.seek(0)
            lines = [line for line in file if line.endswith(b"\n")]
            file.truncate(sum(len(x) for x in lines if json.loads(x)["step"] <= (done or -1)))
    def record(name, records):
        with (out / name).open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in records)
    def save(step):  # beside the old checkpoint, then in its place: a complete one is always there
        new, old = out / "checkpoint.new", out / "checkpoint.old"
        own, model.generation_config = model.generation_config, GenerationConfig()  # valid
        model.save_pretrained(new)
        model.generation_config = own
        own.to_json_file(new / "generation_config.json")
        tokenizer.save_pretrained(new)
        torch.save({"step": step, "optimizer": optimizer.state_dict(),
                    "reference": reference and reference.state_dict()}, new / "trainer.pt")
        if checkpoint.exists():
            shutil.rmtree(old, ignore_errors=True)
            checkpoint.rename(old)
        new.rename(checkpoint)
        shutil.rmtree(old, ignore_errors=True)
    def forward(network, rows):  # of a step's rollout: (rows, logps, entropy) by micro-batches
        rows = rows[useful[rows]]  # those with a loss
        rows = rows[mask[rows].sum(1).argsort()]  # like lengths together: little padding
        for part in rows.split(args.micro_batch or B) if len(rows) else ():
            ids, attention_mask = rollout.input_ids[part], rollout.attention_mask[part]
            used, T = attention_mask.any(0), int(mask[part].sum(1).max())
            pair = token_logps(network, ids[:, used], attention_mask[:, used], T, args.temperature)
            yield part, *(torch.nn.functional.pad(x, (0, mask.shape[1] - T)) for x in pair)
    def accuracy():  # greedy, on the held-out examples; draws no random number
        prompts, texts = [encode_prompt(tokenizer, e["prompt"], args) for e in task.test], []
        for i in range(0, len(prompts), 64):
            texts += sample(model, tokenizer, prompts[i:i + 64], 1, T_max, temperature=0).texts
        return mean(rewards.score([rewards.correct_reward], texts, task.test)[0])

    if args.eval_every and done == 0:
        record("metrics.jsonl", [{"step": 0, "eval_accuracy": accuracy()}])
    step = done  # where --steps asks for no more
    for step in tqdm(range(done + 1, args.steps + 1), "GRPO", disable=None):
        # ---- Sample a group of completions for each prompt.
        t_start = time.perf_counter()
        transformers.set_seed((args.seed * 1_000_000 + step) % 2**32)  # torch, random and numpy
        examples = task.batch((step - 1) * P, P, args.seed)  # P of them
        prompts = [encode_prompt(tokenizer, example["prompt"], args) for example in examples]
        rollout = sample(model, tokenizer, prompts, G, T_max, args.temperature, args.top_p)
        mask = rollout.mask  # (B, T)
        t_sampled = time.perf_counter()
        # ---- Reward each completion with a program; compare it with its group.
        examples = [example for example in examples for _ in range(G)]  # B of them, prompt-major
        try:
            scores = rewards.score(task.rewards, rollout.texts, examples)
        except Exception as error:
            save(step - 1)  # a faulty reward costs this step, not the steps before it
            if isinstance(error, rewards.RewardError):
                sys.exit(f"grpo.py: {error}")
            raise
        scores = torch.tensor(scores, dtype=torch.float64)  # (K, B), a row for each reward function
        reward = (reward_weights @ scores).view(P, G)
        advantages = (group_advantages(reward, args.advantage) if args.advantage != "gdpo" else
                      gdpo_advantages(scores.T.view(P, G, -1), reward_weights))  # (P, G)
        uneven = (advantages != 0).any(1)  # (P,) False for flat groups, which DAPO drops
        groups = (uneven | (args.dynamic_sampling == 0)).nonzero()[:args.prompts_per_step]
        kept = (groups * G + torch.arange(G)).flatten().to(device)  # rows of the update
        advantages = advantages.flatten().to(device, torch.float32)  # (B,)
        # ---- Update: inner_epochs passes over the rollout, an optimizer step for each minibatch.
        t_rewarded = time.perf_counter()
        seen = {k: [] for k in ("loss", "grad_norm", "kl", "entropy", "ratio", "clip_frac")}
        trained = mask & ~(rollout.truncated & args.mask_truncated).unsqueeze(1)  # (B, T)
        useful = ((advantages != 0) | (args.kl_coef > 0)) & trained.any(1)  # (B,) has a loss
        shuffles = [kept[torch.randperm(len(kept))] for _ in range(args.inner_epochs)]
        minibatches = [part for rows in shuffles for part in rows.tensor_split(args.minibatches)]
        old_logps, ref_logps = torch.zeros(2, *mask.shape, device=device)  # (B, T)
        with torch.no_grad():  # before any update; minibatch 0 fills its own in the loop
            for rows, logps, _ in forward(model, shuffles[0][len(minibatches[0]):]):
                old_logps[rows] = logps
            for rows, logps, _ in forward(reference, kept) if reference else ():
                ref_logps[rows] = logps
        for index, minibatch in enumerate(minibatches):
            token_normalizer = denominator(mask[minibatch], args.aggregate, T_max)  # of all rows
            normalizer = len(minibatch) if args.surrogate in PER_COMPLETION else token_normalizer
            if not useful[minibatch].any():
                continue  # no optimizer step: under Adam, momentum alone would move the weights
            optimizer.zero_grad()
            loss_sum = 0.0
            for rows, logps, entropy in forward(model, minibatch):
                if index == 0:  # before any update, too
                    old_logps[rows] = logps.detach()
                loss, stats = policy_loss(
                    logps, old_logps[rows], advantages[rows], trained[rows], args.surrogate,
                    *(args.clip_eps or ()), aggregate=args.aggregate, max_len=T_max,
                    normalizer=normalizer, off_policy_mask=args.off_policy_mask)
                if reference:
                    kl = kl_loss(logps, ref_logps[rows], trained[rows], args.kl, args.aggregate,
                                 old_logps[rows], T_max, token_normalizer)
                    loss = loss + args.kl_coef * kl
                    seen["kl"].append(kl.item())
                loss.backward()
                loss_sum += loss.item()
                seen["entropy"] += entropy[trained[rows]].tolist()
                seen["ratio"] += stats["ratios"].tolist()
                seen["clip_frac"] += stats["clipped"].tolist()
            grad_norm = clip_grad_norm_(model.parameters(), 1.0).item()
            if not math.isfinite(loss_sum + grad_norm):
                sys.exit(f"grpo.py: step {step}: loss {loss_sum}, gradient {grad_norm}; lower --lr")
            optimizer.step()
            seen["loss"].append(loss_sum)
            seen["grad_norm"].append(grad_norm)
        if args.ref_every and step % args.ref_every == 0:
            reference.load_state_dict(model.state_dict())
        # ---- Log. Statistics of the update cover all its passes, and are null where it had none.
        t_end = time.perf_counter()
        last, lengths = bool(stop) or step == args.steps, mask.sum(1).tolist()
        metrics = {
            "step": step, "reward": reward.mean().item(), "reward_std": reward.std(1).mean().item(),
            **{f"reward/{rewards.name(f)}": s.mean().item() for f, s in zip(task.rewards, scores)},
            "advantage_std": advantages.std().item(), "think": mean(rewards.worked(rollout.texts)),
            **{k: mean(seen[k]) for k in ("loss", "grad_norm", "clip_frac", "entropy")},
            "kl": sum(seen["kl"]) / len(seen["loss"]) if seen["kl"] else None,
            "ratio_mean": mean(seen["ratio"]), "ratio_max": max(seen["ratio"], default=None),
            "flat_groups": 1 - mean(uneven.tolist()), "truncated": mean(rollout.truncated.tolist()),
            "length": mean(lengths), "length_max": max(lengths), "lr": args.lr,
            "tokens_per_s": sum(lengths) / (t_end - t_start), "seconds": t_end - t_start,
            "seconds_sample": t_sampled - t_start, "seconds_update": t_end - t_rewarded,
        }
        if args.eval_every and (last or step % args.eval_every == 0):
            metrics["eval_accuracy"] = accuracy()
        record("metrics.jsonl", [metrics])
        record("samples.jsonl", [
            {"step": step, "prompt": examples[i]["prompt"], "completion": rollout.texts[i],
             "rewards": scores[:, i].tolist(), "reward": reward.flatten()[i].item(),
             "advantage": advantages[i].item()} for i in range(B)])
        if step == 1 or last or step % args.log_every == 0:
            shown = (f"{k} {metrics[k]:.3g}" for k in PRINTED if metrics.get(k) is not None)
            tqdm.write(f"{'  '.join(shown)}\n    reward {reward[0, 0]:g}: {rollout.texts[0]!r}")
        flat_steps = 0 if uneven.any() else flat_steps + 1
        if flat_steps and flat_steps % 10 == 0:
            tqdm.write(f"warning: {flat_steps} steps with nothing to compare. Rewards all lowest: "
                       "raise --temperature or grade the --reward; all highest: cut --steps")
        if metrics["truncated"] > 0.5 and step % 10 == 1:
            tqdm.write(f"warning: --max-new-tokens {T_max} cut more than half of the completions")
        if args.save_every and step % args.save_every == 0 and not last:
            save(step)
        if stop:
            break
    save(step)

# ==== Flags and main ============================================================================
def number(kind: type, low: float, high: float = math.inf):  # an argparse type
    def number(text: str):  # argparse shows this name: invalid number value: 'x'
        if not low <= kind(text) <= min(high, 1e300):  # refuses NaN too
            raise argparse.ArgumentTypeError(f"{text} is no finite number from {low:g} to {high:g}")
        return kind(text)
    return number

def parse_args(argv: list[str] | None):
    """(args, task, refuse), checked and resolved; refuse(message) is one line and exit status 2."""
    parser = argparse.ArgumentParser("grpo.py", usage=argparse.SUPPRESS, allow_abbrev=False)
    count, coefficient, yes = number(int, 1), number(float, 0), {"action": "store_true"}
    flag = parser.add_argument
    flag("--task", choices=list(rewards.TASKS), default="format", help="of rewards.py (format)")
    flag("--data", metavar="FILE", help='JSON lines with a "prompt", in place of the task\'s')
    flag("--reward", nargs="+", choices=list(rewards.REWARDS), help="in place of the task's")
    flag("--reward-weights", nargs="+", type=number(float, -1e9), metavar="W", help="(1 each)")
    flag("--model", help=f"tiny, a directory, or a hub name (with CUDA {LARGE}, else tiny)")
    flag("--no-chat-template", **yes, help="prompts reach the model as they are written")
    flag("--thinking", **yes, help="render the chat template with enable_thinking=True")
    flag("--steps", type=number(int, 0), default=200, help="0 only warm-starts and saves (200)")
    flag("--seed", type=number(int, 0, 2**32 - 1), default=0, help="of all that is random (0)")
    flag("--out", help="folder for what the run leaves behind (runs/TASK-TIME)")
    flag("--log-every", type=count, default=10, help="steps between printed lines (10)")
    flag("--save-every", type=count, help="steps between checkpoints (one at the end)")
    flag("--resume", metavar="DIR", help="a run to go on with, its config.json giving the flags")
    flag("--eval-every", type=count, help="steps between greedy accuracies, by `correct` (never)")
    flag("--eval-data", metavar="FILE", help="held-out JSON lines, with answers (the task's)")
    flag("--prompts-per-step", type=count, help="each with a group of its own (the task's)")
    flag("--dynamic-sampling", type=number(int, 0), default=0, help="spares for flat groups (0)")
    flag("--group-size", type=number(int, 2), default=8, help="G, completions of a prompt (8)")
    flag("--max-new-tokens", type=count, help="tokens of the longest completion (the task's)")
    flag("--temperature", type=number(float, 1e-3), default=1.0, help="of sampling and logps (1)")
    flag("--top-p", type=number(float, 1e-6, 1), default=1.0, help="nucleus sampled from (1: all)")
    flag("--lr", type=coefficient, help="AdamW's (1e-5; under 10M parameters, the task's)")
    flag("--advantage", choices=("std", "none", "gdpo"), default="std", help="its scale (std)")
    flag("--surrogate", choices=("reinforce", "sequence", "token", "gspo", "cispo"))
    flag("--clip-eps", type=coefficient, nargs="+", metavar="EPS", help="EPS, or LOW HIGH (none)")
    flag("--aggregate", choices=("sum", "mean", "token", "constant"), default="sum", help="(sum)")
    flag("--mask-truncated", **yes, help="no loss for completions cut by the limit (DAPO)")
    flag("--off-policy-mask", type=coefficient, help="DeepSeek-V3.2's, nats per token (none)")
    flag("--inner-epochs", type=count, help="passes over a rollout (2 with a clip, else 1)")
    flag("--minibatches", type=count, default=1, help="parts of a pass, a step for each (1)")
    flag("--micro-batch", type=count, help="rows in one backward; for memory, same gradient (all)")
    flag("--kl-coef", type=coefficient, default=0.0, help="0: no term and no reference model (0)")
    flag("--kl", choices=("k1", "k2", "k3", "weighted"), default="k3", help="its estimator (k3)")
    flag("--ref-every", type=count, help="steps after which the reference is renewed (never)")
    args = parser.parse_args(argv)
    try:
        if args.resume:
            parser.set_defaults(**json.loads(Path(args.resume, "config.json").read_text()))
            args = parser.parse_args([*(argv or sys.argv[1:]), "--out", args.resume])
        task = rewards.make_task(args)
    except (OSError, ValueError, TypeError, KeyError) as error:
        parser.error(f"--resume {args.resume}: {error}" if args.resume else str(error))
    args.model = args.model or (LARGE if torch.cuda.is_available() else TINY)
    args.out = args.out or f"runs/{args.task}-{time.strftime('%Y%m%d-%H%M%S')}"
    args.surrogate = args.surrogate or ("sequence" if args.clip_eps else "reinforce")
    args.inner_epochs = args.inner_epochs or (2 if args.clip_eps else 1)
    args.prompts_per_step = args.prompts_per_step or task.prompts_per_step
    args.max_new_tokens = args.max_new_tokens or task.max_new_tokens
    for why in (
        len(args.clip_eps or ()) > 2 and "--clip-eps takes one number, or two: LOW HIGH",
        args.clip_eps and args.surrogate == "reinforce"
        and "--clip-eps: --surrogate reinforce has no ratio to clip; use sequence or token",
        args.surrogate == "cispo" and not args.clip_eps and "--surrogate cispo needs --clip-eps",
        args.off_policy_mask is not None and args.inner_epochs * args.minibatches == 1
        and "--off-policy-mask: nothing is off-policy without --inner-epochs or --minibatches",
        args.aggregate != "sum" and args.surrogate in PER_COMPLETION and not args.kl_coef
        and f"--aggregate: --surrogate {args.surrogate} has no terms for tokens without --kl-coef",
        args.minibatches > args.prompts_per_step * args.group_size
        and "--minibatches: more than --prompts-per-step times --group-size, a step's rollouts",
        args.ref_every and not args.kl_coef and "--ref-every needs a --kl-coef above 0",
        args.eval_every and not task.test and "--eval-every needs --eval-data: nothing is held out",
        args.model == TINY and not task.demonstrations
        and f"--model tiny: {args.task} has no demonstrations to start from; use a DIRECTORY",
        Path(args.out, "metrics.jsonl").exists() and not args.resume
        and f"--out {args.out} already holds a run; name another folder, or --resume it",
    ):
        if why:
            parser.error(why)
    return args, task, parser.error

def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1: the run could not go on; 2: the user's mistake; 130: stopped by Ctrl-C."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    logging.get_logger("huggingface_hub").setLevel(logging.ERROR)
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    (args, task, refuse), stop = parse_args(argv), []
    out, fresh = Path(args.out), args.model == TINY and not args.resume
    source, blame = args.model, f"--model {args.model} (offline: --model tiny, --model DIRECTORY)"
    if args.resume:  # from the old checkpoint, if a kill came between the renames of `save`
        whole, blame = (out / "checkpoint").exists(), f"--resume {out}"
        source = out / ("checkpoint" if whole else "checkpoint.old")
    print(f"model: {args.model} (or --model tiny, --model {LARGE}, --model DIRECTORY)", flush=True)
    torch.manual_seed(args.seed)  # the tiny model's weights
    try:
        state = torch.load(source / "trainer.pt", "cpu") if args.resume else None
        model, tokenizer = tiny_policy() if fresh else (
            AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
            AutoTokenizer.from_pretrained(source))
        if len(tokenizer) == len(tokenizer.all_special_ids):
            raise ValueError("no tokenizer there")  # transformers made one up from the config
        room = getattr(model.config.get_text_config(), "max_position_embeddings", 0) or math.inf
        for kind, examples in (("training", task.train), ("held-out", task.test)):
            for row, example in enumerate(examples, 1):
                blame = f"{kind} example {row}"
                tokens = len(encode_prompt(tokenizer, example["prompt"], args))
                if not 0 < tokens <= room - args.max_new_tokens:
                    raise ValueError(f"a prompt of {tokens} tokens and --max-new-tokens "
                                     f"{args.max_new_tokens} do not fit a context of {room}")
        blame = f"--out {out}"
        out.mkdir(parents=True, exist_ok=True)
    except Exception as error:  # whatever a damaged file or a chat template makes others raise
        refuse(f"{blame}: {' '.join(str(error).split())[:300]}")
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    small = model.num_parameters() < 10_000_000
    args.lr = args.lr if args.lr is not None else task.small_model_lr if small else 1e-5
    if small and model.device.type == "cpu":
        torch.set_num_threads(min(2, torch.get_num_threads()))  # more would wait for each other
    config = {**vars(args), "parameters": model.num_parameters(), "torch": torch.__version__,
              "transformers": transformers.__version__}
    (out / "config.json.new").write_text(json.dumps(config, indent=2) + "\n")
    (out / "config.json.new").replace(out / "config.json")  # a kill never leaves half of it
    print("  ".join(f"{name} {value}" for name, value in config.items() if value is not None))
    first = encode_prompt(tokenizer, task.train[0]["prompt"], args)
    print(f"first prompt: {tokenizer.decode(first)!r}", flush=True)
    if fresh:
        warm_start(model, tokenizer, task, args.seed)
    signal.signal(signal.SIGINT, lambda *_: stop.append(True))  # Ctrl-C: finish the step and save
    train(args, task, model, tokenizer, stop, state)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    if curve := [row["reward"] for row in rows if row["step"] > 0]:
        bars = torch.nn.functional.adaptive_avg_pool1d(torch.tensor([curve]), min(60, len(curve)))
        bars = 7 * (bars - bars.min()) / (bars.max() - bars.min()).clamp(min=1e-9)
        print("reward ", "".join("▁▂▃▄▅▆▇█"[round(bar)] for bar in bars[0].tolist()))
        print(f"mean reward: first 5 steps {mean(curve[:5]):.2f}, last 20 {mean(curve[-20:]):.2f}")
    print(f"written to {out}: config.json, metrics.jsonl, samples.jsonl, checkpoint")
    return 130 if stop else 0

if __name__ == "__main__":
    sys.exit(main())
